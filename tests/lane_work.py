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


def together(job: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Take steps as several workers do, adding up over them at each; on worker `who`, do something wrong."""
    import torch
    import torch.distributed as dist

    for step in range(job.get("steps", 10)):
        if channel.rank == job.get("who", 0):
            if step == job.get("die_at"):
                os.kill(os.getpid(), signal.SIGKILL)
            if step == job.get("raise_at"):
                return {"event": "ended", "state": "failed", "reason": "ValueError: a rehearsed error"}
            if step == job.get("hang_at"):
                time.sleep(1000)
        total = torch.tensor([float(channel.rank)])
        try:
            if channel.workers > 1:
                dist.all_reduce(total)
        except RuntimeError as error:
            return {"event": "ended", "state": "failed", "reason": f"RuntimeError: {error}"}
        if channel.rank == 0:
            channel.progress = {"examples": step}
            channel.send({"event": "report", "step": step, "sum": total.item(), "workers": channel.workers})
        time.sleep(job.get("pause", 0.001))
    state = job.get("state", "complete")
    return {"event": "ended", "state": state, "reason": "", "retire": state == "out_of_memory"}
