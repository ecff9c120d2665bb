"""What may happen after a finished run, if the learner asked for it: a WeChat notice, and AutoDL's power-off.

Not here: whether the run is safe (checkpoints say so; a run that is not is never powered off). Nothing here raises.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

from nbutils.masking import mask_secrets
from nbutils.platforms.detection import Platform, fs_root
from nbutils.platforms.network import NoRedirects
from nbutils.platforms.secrets import secret
from nbutils.platforms.waiting import TookTooLong, within

NOTICE_URL = "https://www.autodl.com/api/v1/wechat/message/send"
TOKEN = "AUTODL_TOKEN"
LIMITS = "AutoDL allows 50 notices a day and 5 a minute"


def power_off(platform: Platform, problem: str | None, grace: float = 60.0, root: Path | None = None) -> str:
    """Switch an AutoDL machine off, after a time in which the learner can stop it; says what was done or why not.

    `problem` is why the last checkpoint in keep does not verify; None if it does.
    """
    tool = (root or fs_root()) / "usr/bin/shutdown"
    if platform.name != "autodl":
        return f"Not powered off: this is {platform.name}, and only AutoDL's machines are switched off from inside."
    if problem is not None:
        return f"Not powered off, because the run is not safe yet: {problem}. Look at it, then switch off by hand."
    if not os.access(tool, os.X_OK):
        return f"Not powered off: {tool} is missing. Switch the machine off on AutoDL's page, it costs money."
    print(
        f"This machine is powered off in {grace:.0f} s. To keep it on, interrupt this cell (or press Ctrl-C).",
        flush=True,
    )
    try:
        time.sleep(grace)
        done = subprocess.run([tool], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    except KeyboardInterrupt:
        return "Not powered off: you stopped it. Remember to switch the machine off, it costs money."
    except (OSError, subprocess.SubprocessError) as failed:
        return f"Not powered off: {tool} failed ({type(failed).__name__}). Switch it off on AutoDL's page."
    if done.returncode != 0:
        said = mask_secrets((done.stderr or done.stdout).strip()[-200:])
        return f"Not powered off: {tool} ended with status {done.returncode} ({said}). Switch it off on AutoDL's page."
    return "Powered off. What is on the data disk stays for 15 days; start the same notebook again to go on."


def send_notice(
    title: str, text: str, name: str = "finetune-course", url: str = NOTICE_URL, seconds: float = 10
) -> str:
    """Send a WeChat message through AutoDL; says how it went."""
    token = secret(TOKEN)
    if not token:
        return f"No notice sent: there is no {TOKEN}. Set it to the developer token of your AutoDL account."
    message = {"title": title, "name": name, "content": text}
    body = json.dumps({key: mask_secrets(value) for key, value in message.items()}).encode()
    headers = {"Authorization": token, "Content-Type": "application/json"}
    try:
        answer = within(seconds, lambda: _post(url, body, headers, seconds))
    except urllib.error.HTTPError as refused:
        return _refusal(refused.code)
    except (OSError, ValueError, HTTPException, TookTooLong) as problem:
        return mask_secrets(f"No notice sent: AutoDL's service did not answer ({type(problem).__name__}: {problem}).")
    told = answer if isinstance(answer, dict) else {"code": "an answer nobody understands"}
    if str(told.get("code", "success")).lower() in ("success", "0", "200"):
        return "Notice sent to WeChat."
    said = str(told.get("msg") or told["code"])
    return mask_secrets(f"No notice sent: AutoDL answered {said[:200]!r}. {LIMITS}; the token must be a valid one.")


def _refusal(status: int) -> str:
    why = {401: f"{TOKEN} is not valid", 403: f"{TOKEN} is not valid", 429: f"too many notices: {LIMITS}"}
    return f"No notice sent: HTTP status {status}, {why.get(status, 'AutoDL did not take it')}."


def _post(url: str, body: bytes, headers: dict[str, str], seconds: float) -> Any:
    """The JSON answer to a POST."""
    opener = urllib.request.build_opener(NoRedirects)  # urlopen would keep the proxies of its first call
    with opener.open(urllib.request.Request(url, data=body, headers=headers), timeout=seconds) as answer:
        return json.loads(answer.read(65536))
