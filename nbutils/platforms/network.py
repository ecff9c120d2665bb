"""The network as it is here: which model hub answers fastest, what goes past a proxy, files that are downloaded.

Every wait is bounded, name lookups included; `HF_HUB_OFFLINE=1` means no call at all. huggingface_hub reads the
variables set here when it is imported, which must be later.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nbutils.errors import require_choice
from nbutils.files import fs_root, make_folder, sha256
from nbutils.language import tr

if TYPE_CHECKING:
    from nbutils.platforms import Platform

HUB = "https://huggingface.co"
SOURCES = {"hub": HUB, "hf-mirror": "https://hf-mirror.com", "modelscope": "https://www.modelscope.cn"}
SECONDS = 4.0  # all probes of one start together
REFUSED = (403, 407, 429, 451)
FOUND = "NBUTILS_MIRROR_FOUND"  # the source that was chosen, so that child processes need not measure again
NOTHING = "nothing"
PARTIAL = ".partial"  # the end of the name of a file that is being downloaded
PATIENCE = 30.0  # seconds a download waits for the next bytes
PIECE = 2**18  # bytes written at a time: what a kill may lose
ATTEMPTS = 5  # in a row that bring nothing
HEADERS = {"User-Agent": "nbutils"}
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
NEARBY = (  # faster without AutoDL's proxy: ModelScope with its large files, the usual mirrors of pip, chat robots
    "hf-mirror.com", "modelscope.cn", "aliyuncs.com", "autodl.com", "aliyun.com", "edu.cn", "huaweicloud.com",
    "tencent.com", "tencentyun.com", "feishu.cn", "dingtalk.com", "weixin.qq.com",
)  # fmt: skip


def prepare_network(platform: Platform, probe: bool = True) -> str:
    """Set the mirror before huggingface_hub is imported; a line to print, or none. Without `probe` nobody is asked."""
    _pass_proxies()
    mirror = os.environ.get("NBUTILS_MIRROR")
    if mirror:
        require_choice("NBUTILS_MIRROR", mirror, SOURCES)
    line = ""
    if offline():
        line = tr("offline, as HF_HUB_OFFLINE says: models come from folders and the cache")
    elif mirror and not _own_endpoint():
        _use(mirror)
    elif probe and not _own_endpoint() and chosen() in ("", NOTHING):
        line = _choose(platform)
    return line and tr("network   {line}", line=line)


def sources() -> dict[str, str]:
    """The addresses to download models from, by name, in the order to try; one alone if the learner named it."""
    if offline() or chosen() == NOTHING:
        return {}
    if endpoint := _own_endpoint():
        return {"HF_ENDPOINT": endpoint}
    if mirror := os.environ.get("NBUTILS_MIRROR"):
        return {mirror: SOURCES[mirror]}
    first = chosen() or "hub"
    return {first: SOURCES[first]} | SOURCES


def partial_of(file: Path) -> Path:
    """Where a file lies until its download is complete."""
    return file.with_name(f"{file.name}{PARTIAL}")


def download(
    url: str, file: Path, size: int, checksum: str, advance: Callable[[int], object], token: str | None = None
) -> None:
    """Download a file, going on where a former attempt ended; it gets its name once size and sha256 are right.

    Without a `checksum` the size decides. `advance` is told the bytes as they come, a negative number if what was here
    comes again.
    """
    if file.exists():
        return
    partial = partial_of(file)
    make_folder(file.parent)
    partial.touch()
    failures = 0
    while (have := partial.stat().st_size) < size:
        advance(0)  # it ends a download that was given up, also where no bytes come
        try:
            _append(url, partial, size, advance, token)
        except OSError:
            failures = 0 if partial.stat().st_size > have else failures + 1
            if failures == ATTEMPTS:
                raise
            time.sleep(failures)
    if partial.stat().st_size != size or (checksum and sha256(partial) != checksum):
        partial.unlink()
        raise OSError(f"{file.name} did not arrive as it was sent")
    with open(partial, "rb") as whole:
        os.fsync(whole.fileno())
    os.replace(partial, file)


def _append(url: str, partial: Path, size: int, advance: Callable[[int], object], token: str | None) -> None:
    """Write what one request brings behind what is here, no more than was announced."""
    import requests

    headers = HEADERS | {"Range": f"bytes={partial.stat().st_size}-", "Accept-Encoding": "identity"}
    if token:  # requests keeps it from another host that an answer points to
        headers["Authorization"] = f"Bearer {token}"
    with requests.get(url, headers=headers, stream=True, timeout=PATIENCE) as answer, open(partial, "ab") as out:
        answer.raise_for_status()
        if answer.status_code != 206:  # the whole file comes, or a page of a proxy
            length = int(answer.headers.get("Content-Length", size))
            if length != size:
                raise OSError(f"{length} bytes came instead of {size}")
            advance(-partial.stat().st_size)
            out.truncate(0)
        for piece in answer.iter_content(PIECE):
            out.write(piece)
            advance(len(piece))
            if partial.stat().st_size > size:
                return
    if partial.stat().st_size < size:
        raise OSError("the connection ended early")


def offline() -> bool:
    """Whether the learner forbade the network, as huggingface_hub reads it."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE", "")
    return value.upper() in ("1", "TRUE", "YES", "ON")


def _own_endpoint() -> str:
    """What the learner, not this module, set HF_ENDPOINT to."""
    return "" if FOUND in os.environ else os.environ.get("HF_ENDPOINT", "")


def chosen() -> str:
    """Where models come from ("hub", "hf-mirror", "modelscope", "nothing" if none answered); "" if not known yet."""
    if _own_endpoint():
        return ""
    return os.environ.get("NBUTILS_MIRROR") or os.environ.get(FOUND, "")


def hub_online() -> bool:
    """Whether the model hub (or the mirror in HF_ENDPOINT) answers, asked briefly; not at all if none did just now."""
    if offline() or chosen() == NOTHING:
        return False
    return bool(measure({"hub": os.environ.get("HF_ENDPOINT", HUB)}, SECONDS))


def measure(urls: Mapping[str, str], seconds: float) -> dict[str, float]:
    """Seconds until each address answered, all asked at once; those that did not in time are left out."""
    import requests

    times: dict[str, float] = {}
    began = time.monotonic()

    def ask(name: str, url: str) -> None:
        with suppress(OSError), requests.get(url, headers=HEADERS, timeout=seconds, stream=True) as answer:
            if answer.status_code < 500 and answer.status_code not in REFUSED:
                times[name] = time.monotonic() - began

    # daemons and not a pool: a name lookup knows no timeout, and nobody must wait for it when the lesson ends
    threads = [threading.Thread(target=ask, args=pair, daemon=True) for pair in urls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(began + seconds - time.monotonic(), 0))
    return dict(times)


def _choose(platform: Platform) -> str:
    """Measure, and take the fastest; what to say of it."""
    if platform.entry.china:
        times = measure(SOURCES, SECONDS)
    else:  # the mirrors are far: asked only if the hub is silent
        times = measure({"hub": SOURCES["hub"]}, SECONDS / 2) or measure(SOURCES, SECONDS / 2)
    if not times:
        _use(NOTHING)
        return tr("neither the hub nor a mirror answers: models come from folders and the cache")
    name = min(times, key=times.__getitem__)
    only_mirrors = "hf-mirror" in times and "hub" not in times
    _use("hf-mirror" if only_mirrors else name)  # for what ModelScope does not have
    os.environ[FOUND] = name
    if name == "hub" and not platform.entry.china:
        return ""
    return tr("models come from {source}, which answers best (NBUTILS_MIRROR overrides)", source=name)


def _use(name: str) -> None:
    """Point huggingface_hub to a source; a mirror gets no token, and Xet would go past it."""
    mirrored = {"HF_ENDPOINT": SOURCES["hf-mirror"], "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
    if name == "hf-mirror":
        os.environ |= mirrored
    elif FOUND in os.environ:  # set here before
        for variable in mirrored:
            os.environ.pop(variable, None)
    os.environ[FOUND] = name


def _pass_proxies() -> None:
    """Let requests to this machine (the server of lesson 05), and on AutoDL to what is near, go past the proxies."""
    if not any(os.environ.get(name) or os.environ.get(name.upper()) for name in PROXIES):
        return
    on_autodl = (fs_root() / "etc/network_turbo").is_file()  # the proxies are those that this script sets
    reach_directly(NEARBY if on_autodl else ())


def reach_directly(nearby: Iterable[str] = ()) -> None:
    """Let requests to this machine and to hosts nearby go past any proxy."""
    for name in ("no_proxy", "NO_PROXY"):
        hosts = [*os.environ.get(name, "").split(","), "127.0.0.1", "localhost", *nearby]
        os.environ[name] = ",".join(dict.fromkeys(hosts)).strip(",")
