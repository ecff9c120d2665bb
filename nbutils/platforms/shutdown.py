"""After a finished run, only if the learner asked for it: a WeChat notice, and AutoDL's power-off. Nothing here raises.

Whether the run is safe is for checkpoints to say; a run that is not is never powered off.
"""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from http.client import HTTPException
from pathlib import Path

from nbutils.masking import mask_secrets
from nbutils.platforms.detection import Platform, fs_root, secret
from nbutils.platforms.network import NoRedirects

NOTICE_URL = "https://www.autodl.com/api/v1/wechat/message/send"
TOKEN = "AUTODL_TOKEN"


def power_off(platform: Platform, problem: str | None, grace: float = 60.0, root: Path | None = None) -> str:
    """Switch an AutoDL machine off, after a time in which the learner can stop it; says what was done or why not.

    `problem` is why the last checkpoint in keep does not verify; None if it does.
    """
    tool = (root or fs_root()) / "usr/bin/shutdown"
    if platform.name != "autodl":
        return f"Not powered off: this is {platform.name}, and only AutoDL's machines are switched off from inside."
    if problem is not None:
        return f"Not powered off, because the run is not safe yet: {problem}. Look at it, then switch off by hand."
    print(f"This machine is powered off in {grace:.0f} s. To keep it on, interrupt this cell (Ctrl-C).", flush=True)
    try:
        time.sleep(grace)  # then without arguments: it would not be AutoDL's power-off
        subprocess.run([tool], stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError, KeyboardInterrupt) as failed:
        said = mask_secrets(f"{type(failed).__name__}: {failed}")
        return f"Not powered off ({said}). Switch the machine off on AutoDL's page, it costs money."
    return "Powered off. What is on the data disk stays for 15 days; start the same notebook again to go on."


def send_notice(title: str, text: str, name: str = "finetune-course", url: str = NOTICE_URL) -> str:
    """Send a WeChat message through AutoDL; says how it went."""
    token = secret(TOKEN)
    if not token:
        return f"No notice sent: there is no {TOKEN}. Set it to the developer token of your AutoDL account."
    message = {"title": title, "name": name, "content": text}
    body = json.dumps({key: mask_secrets(value) for key, value in message.items()}).encode()
    headers = {"Authorization": token, "Content-Type": "application/json"}
    opener = urllib.request.build_opener(NoRedirects)  # urlopen would keep the proxies of its first call
    try:
        with opener.open(urllib.request.Request(url, data=body, headers=headers), timeout=10) as answer:
            reply = dict(json.loads(answer.read(65536)))
    except (OSError, ValueError, TypeError, HTTPException) as problem:  # an HTTP status is an OSError here
        return mask_secrets(f"No notice sent ({type(problem).__name__}: {problem}).")
    if str(reply.get("code", "success")).lower() in ("success", "0", "200"):
        return "Notice sent to WeChat."
    return mask_secrets(f"No notice sent: AutoDL answered {str(reply)[:200]!r}.")
