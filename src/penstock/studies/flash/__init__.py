"""Inside an SSD: what writes cost it, and how long it lasts."""

from penstock.studies.flash.drive import Drive
from penstock.studies.flash.geometry import Flash, lifetime_s, uniform_write_amplification
from penstock.studies.flash.wear import LAYOUTS, Wear, wear

__all__ = [
    "LAYOUTS",
    "Drive",
    "Flash",
    "Wear",
    "lifetime_s",
    "uniform_write_amplification",
    "wear",
]
