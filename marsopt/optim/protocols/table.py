"""Which protocol serves which correction; ``marsopt.register`` adds to the table."""

from __future__ import annotations

from marsopt.optim.protocols.base import CorrectionProtocol
from marsopt.optim.protocols.exact import NextGradients
from marsopt.optim.protocols.transport import Lookahead
from marsopt.rules.correction import Correction
from marsopt.rules.exact import Exact
from marsopt.rules.registry import PROTOCOLS, register
from marsopt.rules.transport import Transport

SERVED_BY: dict[type[Correction], type[CorrectionProtocol]] = {
    Exact: NextGradients,
    Transport: Lookahead,
}
for _correction, _protocol in SERVED_BY.items():
    register(_correction, protocol=_protocol)


def protocol_of(correction: type[Correction]) -> type[CorrectionProtocol]:
    """Return the protocol of a correction, or of the nearest class that it is made of;
    that without any answer where none of them has one.
    """
    kinds = (kind for kind in correction.__mro__ if kind in PROTOCOLS)
    nearest = next(kinds, None)
    return CorrectionProtocol if nearest is None else PROTOCOLS[nearest]
