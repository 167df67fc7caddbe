"""The mesh: ``local`` really is within a host, in whatever order the devices come."""

from __future__ import annotations

import dataclasses
import random

import jax
import pytest

import zeroj as zj
from zeroj.plan import mesh as meshes


@dataclasses.dataclass(frozen=True)
class Device:
    """What a mesh looks at of a device."""

    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


def shuffled(hosts: int, each: int) -> list[Device]:
    devices = [Device(host * each + i, host) for host in range(hosts) for i in range(each)]
    random.Random(0).shuffle(devices)
    return devices


@pytest.mark.parametrize(("hosts", "each"), [(2, 4), (4, 2), (3, 5)])
def test_local_is_within_one_process_though_devices_come_in_disorder(hosts: int, each: int) -> None:
    mesh = zj.make_mesh(devices=shuffled(hosts, each))
    assert dict(mesh.shape) == {"node": hosts, "local": each}
    for row in mesh.devices:
        assert len({device.process_index for device in row}) == 1
    assert sorted(d.id for d in mesh.devices.flat) == list(range(hosts * each))


def test_a_local_axis_that_would_span_hosts_is_refused() -> None:
    with pytest.raises(zj.PlanError, match="local"):
        zj.make_mesh(devices=shuffled(4, 2), node=2, local=4)


def test_a_mesh_need_not_be_made_of_all_devices() -> None:
    mesh = zj.make_mesh(devices=jax.devices()[:6], node=3, local=2)
    assert meshes.zero_axes_of(mesh, None) == ("node", "local")
