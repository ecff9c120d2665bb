"""Drive is not there on Kaggle."""

import os
from pathlib import Path


def mount(*_: object, **__: object) -> None:
    (Path(os.environ["NBUTILS_FS_ROOT"]) / "fake_calls.txt").write_text("mount\n")
    raise NotImplementedError("google.colab.drive is unsupported in this environment.")
