"""What an owner tells the leader of an emission or a fold that has ended."""

from collections.abc import Mapping

from dcr.protocol import owner as role
from dcr.protocol.layer_changes import LayerChanges
from dcr.protocol.messages import EmitFailed, Folded, Report, Sealed


def report_of(
    effect: role.ReportSealed | role.ReportEmitFailed | role.ReportFolded,
    name: str,
    incarnation: int,
    seconds: Mapping[str, float],
    layers: tuple[LayerChanges, ...],
) -> Report:
    """The message that carries a report of the role.

    Args:
        effect: the report.
        name: the owner's.
        incarnation: its own.
        seconds: of work by stage, of what has ended.
        layers: what an emission changed.
    """
    match effect:
        case role.ReportSealed():
            m = effect.manifest
            return Sealed(
                owner=m.owner,
                incarnation=incarnation,
                epoch=m.epoch,
                manifest_digest=m.digest(),
                content_digest=m.content_digest,
                payloads=len(m.payloads),
                payload_bytes=sum(p.size_bytes for p in m.payloads),
                changed_entries=m.changed_entries,
                owned_elements=m.owned_elements,
                seconds=dict(seconds),
                layers=layers,
            )
        case role.ReportEmitFailed():
            return EmitFailed(name, incarnation, effect.epoch, effect.reason, effect.fatal, effect.given_up)
        case role.ReportFolded():
            return Folded(name, incarnation, effect.epoch, effect.baseline_digest, effect.reason, dict(seconds))
