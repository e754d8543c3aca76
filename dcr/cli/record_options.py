"""Options that every command about a record has, under the same names."""

import argparse

from dcr.runtime.channel_address import LOOPBACK


def add_control(parser: argparse.ArgumentParser) -> None:
    """``--control``: where the record is."""
    parser.add_argument(
        "--control", required=True, metavar="ADDRESS", help="control plane, as trainer and nodes have it"
    )


def add_record_id(parser: argparse.ArgumentParser) -> None:
    """``--record-id``, which was ``--record`` in most commands once, and may be that still."""
    parser.add_argument(
        "--record-id",
        "--record",
        default="default",
        metavar="ID",
        dest="record_id",
        help="the trainer's record_id (default); --record is the older name of this option",
    )


def add_channel(parser: argparse.ArgumentParser) -> None:
    """``--channel``: how the leader is reached."""
    parser.add_argument(
        "--channel",
        default=LOOPBACK,
        metavar="ADDRESS",
        help="setting channel, as trainer and nodes have it: loopback (default) or tls:///folder/of/credentials",
    )
