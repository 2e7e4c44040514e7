"""Stands in for `twoaxis train`: writes a run folder as the trainer does, without training. Standard library only.

Usage: fake_trainer.py SCRIPT RECIPE RUN_DIR, where SCRIPT is JSON with the parameter names of every arm, the record of
the data, the seconds of a step, and what each run does: a list of actions, one for each time it is started.
"""

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path


def write(path: Path, data: object) -> None:
    path.with_suffix(".tmp").write_text(json.dumps(data))
    os.replace(path.with_suffix(".tmp"), path)


def main(script: dict, recipe: dict, run: Path) -> int:
    arm, seed = run.parent.name, recipe["seed"]
    run.mkdir(parents=True, exist_ok=True)
    lock = open(run / ".lock", "ab")  # noqa: SIM115, held until the process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("another process trains in it", file=sys.stderr)
        return 2
    starts = run / "starts.txt"
    started = len(starts.read_text()) if starts.exists() else 0
    starts.write_text("x" * (started + 1))
    with open(run.parents[1] / "order.txt", "a") as order:
        order.write(f"{arm}/{seed}\n")
    actions = script["actions"].get(f"{arm}/{seed}", [])
    action = actions[started] if started < len(actions) else "finish"
    print("a table that belongs to nobody", file=sys.stdout)
    if action == "bad input":
        print("ConfigError: d_model=7: must be even; add 1", file=sys.stderr)
        return 2
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))

    write(run / "config.json", recipe)
    data = script["data"]
    if action == "other data":
        data = {**data, "corpus": {**data["corpus"], "fingerprint": "another"}}
    write(run / "data.json", data)
    write(run / "env.json", {"versions": {"twoaxis": "0"}, "platform": "fake", "threads": 1, "git_commit": None})
    salt = "other" if action == "other start" else ""
    # Any text serves as a checksum; hashlib would take most of the time of a run.
    checksums = {name: f"{salt}{seed}/{name}" for name in script["parameters"][arm.partition("@lr=")[0]]}
    write(run / "initial_parameters.json", checksums)

    loss = script["losses"].get(f"{arm}/{seed}", 5.0)
    metrics, steps = run / "metrics.jsonl", recipe["steps"]
    done = metrics.read_text().count("\n") if metrics.exists() else 0
    with open(metrics, "a") as file:
        for step in range(done + 1, steps + 1):
            record = {"step": step, "loss": loss + 1 / step, "grad_norm": 1.0, "lr": 0.1, "tokens": 64, "seconds": 0.01}
            if step % recipe["validate_every"] == 0 or step == steps:
                record |= {"validation_loss": loss + (steps - step) / steps, "bpb": 2.0}
            file.write(json.dumps(record) + "\n")
            file.flush()
            time.sleep(script.get("step_seconds", 0))
            if action == "kill" and step == steps // 2:
                print("half way", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if stopped:
                print(f"stopped after step {step}, which is saved", file=sys.stderr)
                return 130
    diverged = action == "diverge"
    result = {
        "status": "diverged" if diverged else "finished",
        "message": "diverged at step 3: loss nan" if diverged else f"finished {steps} steps",
        "steps": steps,
        "tokens": steps * 64,
        "target_tokens": steps * 64,
        "parameters": 1000 + len(arm),
        "validation_loss": None if diverged else loss,
        "best_validation_loss": loss,
        "bpb": 2.0,
        "forward_flops_per_token": 2000.0,
        "training_flops_per_token": 6000.0 + len(arm),
        "train_seconds": 1.0,
        "tokens_per_second": 100.0 + len(arm),
        "step_seconds": 0.01,
        "peak_memory_bytes": 2**28 + len(arm),
        "peak_device_memory_bytes": 0,
    }
    write(run / "result.json", result)
    return 1 if diverged else 0


if __name__ == "__main__":
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text()), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])))
