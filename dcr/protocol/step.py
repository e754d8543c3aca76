"""The trail that roles leave: one ``Step`` for each action of the protocol that was taken."""

import msgspec


class Step(msgspec.Struct, frozen=True):
    """An action was taken, under the name that docs/protocol.md and the spec give it.

    Roles emit it before the effects that carry the action out, so that whoever watches sees the step first.
    """

    actor: str
    action: str
    epoch: int
    detail: str = ""
