"""What can go wrong while an image is built, as one exception with a sentence for the operator."""

from __future__ import annotations


class ImageError(Exception):
    """The fact, then the way out. Nothing was published."""
