"""What the platform allows: hours, processors, memory.

Not here: disk room (disk), because it depends on the folder asked about.
"""

from __future__ import annotations

from nbutils.platforms.detection import Platform

TIME_LIMIT_HOURS = {"colab": 12.0, "kaggle": 12.0}


def time_limit_hours(platform: Platform) -> float:
    """How long a machine of this platform lives; 0 if nobody takes it away."""
    return TIME_LIMIT_HOURS.get(platform.name, 0.0)


def session_seconds(platform: Platform) -> float:
    """How long this machine has been up on a platform that counts the hours; 0 elsewhere."""
    return 0.0
