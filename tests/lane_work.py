"""What lanes do in tests: small stand-ins for a training."""

import os
import signal
import time
from typing import Any


def walk(job: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Take steps, sending now and then; `at` a step, do something wrong."""
    for step in range(job.get("steps", 10)):
        channel.progress = {"examples": step}
        if step % 5 == 0:
            channel.send({"event": "report", "step": step})
        if channel.order:
            return {"event": "ended", "state": channel.order}
        if step == job.get("die_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if step == job.get("hang_at"):
            time.sleep(1000)
        time.sleep(job.get("pause", 0.001))
    return {"event": "ended", "state": "complete", "retire": job.get("retire", False)}
