"""The accuracy gate: two engines must answer exactly as one does, and every damaged hand-off must show.

report = run_gate([bundled()], SMALL)
assert report.passed, report.failures()
"""

from stateferry.gate.engines import Engines, RealEngines
from stateferry.gate.judge import Tally
from stateferry.gate.report import GateReport, ModelReport
from stateferry.gate.run import FULL, SMALL, Running, Silent, Size, Watcher, judge_engines, run_gate
from stateferry.gate.speculation import Drafts, Speculation, parse_speculation
from stateferry.gate.subjects import Subject, bundled, in_folder, seeded

__all__ = [
    "FULL",
    "SMALL",
    "Drafts",
    "Engines",
    "GateReport",
    "ModelReport",
    "RealEngines",
    "Running",
    "Silent",
    "Size",
    "Speculation",
    "Subject",
    "Tally",
    "Watcher",
    "bundled",
    "in_folder",
    "judge_engines",
    "parse_speculation",
    "run_gate",
    "seeded",
]
