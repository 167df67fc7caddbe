"""Every private JAX name and every difference between JAX versions lives in this file."""

from __future__ import annotations
