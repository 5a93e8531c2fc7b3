"""Inside an SSD: what writes cost it, and how long it lasts."""

from penstock.simulator.flash.drive import Drive
from penstock.simulator.flash.geometry import Flash, lifetime_s, uniform_write_amplification
from penstock.simulator.flash.wear import LAYOUTS, Wear, wear

__all__ = [
    "LAYOUTS",
    "Drive",
    "Flash",
    "Wear",
    "lifetime_s",
    "uniform_write_amplification",
    "wear",
]
