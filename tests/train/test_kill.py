"""A run that is killed at random moments ends like one that was not; the script runs it with more kills."""

import subprocess
import sys
from pathlib import Path


def test_killed_runs_resume_bit_for_bit() -> None:
    script = Path(__file__).with_name("kill_and_resume.py")
    done = subprocess.run([sys.executable, str(script), "--kills", "3"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "everything equals what was never killed, bit for bit" in done.stdout
