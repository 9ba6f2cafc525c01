import subprocess
import sys

from tests.doubles.disks import Disk, small_disk

SPEAKS = """
import sys
from pathlib import Path
from prime_rl.logs import get_logger, setup_logging

setup_logging("speaker", "info", Path(sys.argv[1]) if len(sys.argv) > 1 else None, to_terminal=len(sys.argv) == 1)
logger = get_logger("prime_rl.speaker")
for number in range(2000):
    logger.info("line %d %s", number, "x" * 100)
    print("printed", number)
    print("told", number, file=sys.stderr) if len(sys.argv) == 1 else None
sys.exit(7)
"""


def speak(disk: Disk, *words: str) -> subprocess.CompletedProcess[str]:
    """A process of which standard output and error are a file on `disk`, as the launcher has it, or, with a file as an
    argument, its log."""
    argv = [sys.executable, "-c", SPEAKS, *words]
    if words:
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    with (disk.root / "said.log").open("ab") as file:
        return subprocess.run(argv, stdout=file, stderr=subprocess.STDOUT, text=True, check=False, timeout=60)


def test_a_process_whose_output_goes_to_a_full_disk_ends_as_it_would_have_ended(tmp_path):
    with small_disk(tmp_path / "disk", mib=1) as disk:
        disk.fill(leave_bytes=1 << 14)
        done = speak(disk)
        said = (disk.root / "said.log").read_text()
    assert done.returncode == 7
    assert "line 0 xxx" in said
    assert "line 1999" not in said
    assert "Traceback" not in said


def test_a_log_file_on_a_full_disk_is_said_once_and_the_process_goes_on(tmp_path):
    with small_disk(tmp_path / "disk", mib=1) as disk:
        disk.fill()
        done = speak(disk, str(disk.root / "speaker.log"))
    assert done.returncode == 7
    assert done.stdout.count("printed") == 2000
    assert done.stderr.count("\n") == 1
    assert "speaker.log is not written, and the run goes on: the disk is full" in done.stderr


def test_a_log_file_that_cannot_be_made_is_said_once_and_the_process_goes_on(tmp_path):
    (tmp_path / "logs").write_text("in the way")
    done = speak(Disk(tmp_path), str(tmp_path / "logs" / "speaker.log"))
    assert done.returncode == 7
    assert done.stderr.count("\n") == 1
    assert "speaker.log is not written, and the run goes on: " in done.stderr


def test_records_reach_terminal_and_file_with_level_and_process(tmp_path):
    code = """
import sys
from pathlib import Path
from prime_rl.logs import get_logger, setup_logging
setup_logging("trainer", "info", Path(sys.argv[1]))
get_logger("prime_rl.x").info("caf\\u00e9 %d", 3)
get_logger("prime_rl.x").debug("not said")
"""
    file = tmp_path / "deep" / "trainer.log"
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, check=True)
    line = file.read_text(encoding="utf-8")
    assert line.endswith(" INFO    trainer      | caf\u00e9 3\n")
    assert done.stderr.decode() == line
