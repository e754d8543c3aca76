"""Which actions of the specification seeds took, and what more may be of interest."""

from collections import Counter
from collections.abc import Iterable

SPEC_ACTIONS = (
    *("CandidateReady", "OpenAttempt", "RollBack", "OrderOpenApply", "AttemptFailed", "Commit", "Stop", "Abandon"),
    *("Publish", "FinishTransition", "OpenRestore", "EndRestore", "Admit"),
    *("TakeOver", "ReadBack", "WriteAgain", "LateWrite", "Fatal"),
    *("Emit", "Seal", "EmitFailed", "BeginFold", "FoldCell", "EndFold", "LoseBaseline", "StepCandidate"),
    "OwnerRestart",
    *("CloseGate", "LoseRecord", "GateClosed", "OpenGate", "LearnCommit", "OpenApply", "EngineRestart"),
    *("Fence", "Stage", "BeginWrite", "EndWrite", "FailWrite", "Acknowledge"),
)
"""Actions of spec/tla, as `RefitTraces.tla` names their steps.  Roles say so, under the same names (``Step``),
and moves say so of what is the environment's."""

SPECIAL_CASES = (
    *("OpenAttempt relative forward", "OpenAttempt absolute forward", "OpenAttempt dense forward"),
    *("OpenAttempt absolute back", "a rollback that was committed", "an attempt of another leader's transition"),
    *("a fold that another leader ordered", "a late write that took effect", "a late write that was refused"),
    *("RestoreFailed", "RefuseMember", "Evict", "Wait", "FailAttempt", "DeliverManifest", "Prepare", "CreateRecord"),
    *("MemberServes", "a stopped transition that went on", "engines that K names are waited for"),
)
"""Ways in which actions were taken, and steps of the code that the specification has not."""


class Coverage:
    """By how many seeds each action was taken."""

    def __init__(self) -> None:
        self.seeds = 0
        self.taken: Counter[str] = Counter()

    def add(self, actions: Iterable[str]) -> None:
        """What one seed took."""
        self.seeds += 1
        self.taken.update(actions)

    @property
    def never(self) -> list[str]:
        """Actions of the specification that no seed took."""
        return [a for a in SPEC_ACTIONS if not self.taken[a]]

    def table(self) -> list[tuple[str, int]]:
        """(action, seeds): the specification's, then the special cases."""
        return [(a, self.taken[a]) for a in (*sorted(SPEC_ACTIONS), *SPECIAL_CASES)]
