"""The network as it is here: AutoDL's proxies, whether the model hub answers, and which mirror to use instead.

Every wait is bounded, name lookups included; `HF_HUB_OFFLINE=1` means no call at all. huggingface_hub reads the
variables set here when it is imported, which must be later.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

from nbutils.errors import CourseError
from nbutils.files import fs_root
from nbutils.masking import mask_secrets

if TYPE_CHECKING:
    from nbutils.platforms import Platform

HUB = "https://huggingface.co"
SOURCES = {"hub": HUB, "hf-mirror": "https://hf-mirror.com", "modelscope": "https://www.modelscope.cn"}
CONFIG_FILE = {  # the same small file, at the address from which each of them is downloaded
    "hub": "/Qwen/Qwen2.5-0.5B-Instruct/resolve/main/config.json",
    "hf-mirror": "/Qwen/Qwen2.5-0.5B-Instruct/resolve/main/config.json",
    "modelscope": "/api/v1/models/Qwen/Qwen2.5-0.5B-Instruct/repo?Revision=master&FilePath=config.json",
}
SECONDS = 4.0  # all probes of one start together
TURBO_SECONDS = 5.0
REFUSED = (403, 407, 429, 451)
FOUND = "NBUTILS_MIRROR_FOUND"  # the source that was chosen, so that child processes need not measure again
NOTHING = "nothing"
SILENCE = "neither the hub nor a mirror answers: models come from folders and the cache"
NO_TOKEN = {"hf-mirror": "; no token is sent there: gated models come from the hub (NBUTILS_MIRROR=hub) or a folder"}
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
THIS_MACHINE = ("127.0.0.1", "localhost")
NEARBY = (  # faster without AutoDL's proxy: ModelScope with its large files, the usual mirrors of pip, chat robots
    "hf-mirror.com", "modelscope.cn", "aliyuncs.com", "autodl.com", "aliyun.com", "tuna.tsinghua.edu.cn",
    "ustc.edu.cn", "huaweicloud.com", "tencent.com", "tencentyun.com", "feishu.cn", "dingtalk.com", "weixin.qq.com",
)  # fmt: skip


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """For requests that carry a secret: urllib would send it on to wherever an answer points."""

    def redirect_request(self, *about: Any) -> None:
        """No other address is asked: the answer counts as an error."""


def prepare_network(platform: Platform, probe: bool = True) -> list[str]:
    """Set proxies and mirror before huggingface_hub is imported; what to print. Nothing is measured without `probe`."""
    lines = _use_turbo()
    mirror = os.environ.get("NBUTILS_MIRROR", "")
    if mirror and mirror not in SOURCES:
        raise CourseError("platforms.unknown_mirror", name=mirror, names=", ".join(SOURCES))
    if offline():
        lines.append("offline, as HF_HUB_OFFLINE says: models come from folders and the cache")
    elif not chosen() and (own := os.environ.get("HF_ENDPOINT")):
        lines.append(f"models come from {own}, as HF_ENDPOINT says")
    elif mirror:
        _use(mirror)
        lines.append(f"models come from {mirror}, as NBUTILS_MIRROR says{NO_TOKEN.get(mirror, '')}")
    elif (found := chosen()) not in ("", NOTHING):
        lines += [f"models come from {found}, as found before"] if found != "hub" else []
    elif probe:
        lines += _choose(platform)
    return [mask_secrets(f"network   {line}") for line in lines]


def offline() -> bool:
    """Whether the learner forbade the network."""
    values = [os.environ.get(name, "").upper() for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")]
    return any(value in ("1", "TRUE", "YES", "ON") for value in values)


def chosen() -> str:
    """Where models come from ("hub", "hf-mirror", "modelscope", "nothing" if none answered); "" if not known yet."""
    own = FOUND not in os.environ and os.environ.get("HF_ENDPOINT")  # set by the learner, not by this module
    return "" if own else os.environ.get("NBUTILS_MIRROR") or os.environ.get(FOUND, "")


def hub_online() -> bool:
    """Whether the model hub (or the mirror in HF_ENDPOINT) answers, asked briefly; not at all if none did just now."""
    return not offline() and chosen() != NOTHING and answers(os.environ.get("HF_ENDPOINT", HUB), SECONDS)


def answers(url: str, seconds: float) -> bool:
    """Whether a web address answers at all within the given time."""
    return bool(measure({"it": url}, seconds, refused=()))


def measure(urls: Mapping[str, str], seconds: float, refused: Iterable[int] = REFUSED) -> dict[str, float]:
    """Seconds until each address answered, all asked at once; those that did not in time are left out."""
    times: dict[str, float] = {}
    began = time.monotonic()

    def ask(name: str, url: str) -> None:
        opener = urllib.request.build_opener()  # urlopen would keep the proxies of its first call
        try:
            with opener.open(urllib.request.Request(url, headers={"User-Agent": "nbutils"}), timeout=seconds) as answer:
                status = int(answer.status)
        except urllib.error.HTTPError as problem:
            status = problem.code
        except (OSError, ValueError, HTTPException):
            return
        if status < 500 and status not in refused:
            times[name] = time.monotonic() - began

    # daemons and not a pool: a name lookup knows no timeout, and nobody must wait for it when the lesson ends
    threads = [threading.Thread(target=ask, args=pair, daemon=True) for pair in urls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(began + seconds - time.monotonic(), 0))
    return dict(times)


def _choose(platform: Platform) -> list[str]:
    """Measure, and take the hub if it needs at most twice the best time, else the fastest."""
    urls = {name: base + CONFIG_FILE[name] for name, base in SOURCES.items()}
    if platform.entry.china:
        times = measure(urls, SECONDS)
    else:  # elsewhere the mirrors are far: asked only if the hub is silent
        times = measure({"hub": urls.pop("hub")}, SECONDS / 2) or measure(urls, SECONDS / 2)
    name = min(times, key=times.__getitem__, default=NOTHING)
    if "hub" in times and times["hub"] <= 2 * times[name]:
        name = "hub"
    only_mirrors = name == "modelscope" and "hf-mirror" in times and "hub" not in times
    _use("hf-mirror" if only_mirrors else name)  # for what ModelScope does not have
    os.environ[FOUND] = name
    if name == NOTHING:
        return [SILENCE]
    seen = ", ".join(f"{one} {times[one]:.2f} s" if one in times else f"{one} silent" for one in SOURCES)
    line = f"models come from {name} ({seen}; NBUTILS_MIRROR overrides){NO_TOKEN.get(name, '')}"
    return [line] if name != "hub" or platform.entry.china else []


def _use(name: str) -> None:
    """Point huggingface_hub to a source; a mirror gets no token, and Xet would go past it."""
    mirrored = {"HF_ENDPOINT": SOURCES["hf-mirror"], "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
    if name == "hf-mirror":
        os.environ |= mirrored
    elif FOUND in os.environ:  # set here before
        for variable in mirrored:
            os.environ.pop(variable, None)
    os.environ[FOUND] = name


def _use_turbo() -> list[str]:
    """AutoDL's proxies for GitHub and the hub, as its script sets them; a learner's own proxies stay."""
    script, lines, direct = fs_root() / "etc/network_turbo", list[str](), [*THIS_MACHINE]
    if not any(os.environ.get(name) or os.environ.get(name.upper()) for name in PROXIES):
        if not script.is_file() or os.environ.get("NBUTILS_TURBO", "").lower() in ("off", "0", "no"):
            return []
        command = ["bash", "-c", 'source "$0" >/dev/null 2>&1 </dev/null; env -0', str(script)]
        try:
            found = subprocess.check_output(command, timeout=TURBO_SECONDS, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.SubprocessError):
            return [f"{script} failed: GitHub and the hub are reached directly"]
        variables = dict(entry.split("=", 1) for entry in found.decode("utf-8", "replace").split("\0") if "=" in entry)
        os.environ |= {name: value for name, value in variables.items() if name.lower() in PROXIES}
        direct = [*variables.get("no_proxy", "").split(","), *THIS_MACHINE, *NEARBY]
        lines = [f"proxies of {script} for GitHub and the hub (NBUTILS_TURBO=off leaves them)"]
    for name in ("no_proxy", "NO_PROXY"):  # to this machine for the server of lesson 05, to what is near for its speed
        known = [part.strip() for part in [*os.environ.get(name, "").split(","), *direct]]
        os.environ[name] = ",".join(dict.fromkeys(filter(None, known)))
    return lines
