"""What Kaggle's image inherits from Colab's: a package that imports and does nothing useful."""
