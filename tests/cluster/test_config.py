"""cluster.toml."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyorch.cluster import config
from pyorch.cluster.config import read_cluster
from pyorch.errors import FormatError, PyorchError

WHOLE = """
model = "models/olmoe.gguf"

[network]
bandwidth = "500Mbit/s"
latency = "1ms"

[[server]]
name = "clinic"
address = "10.0.0.1"
port = 8080
peer_port = 9080
memory = "2GiB"
devices = 2

[[server]]
name = "lab"
memory = ["1GiB", "10%"]

[[server]]
name = "ward-3"
memory = "40%"
devices = 4

[[link]]
between = ["lab", "clinic"]
bandwidth = "60MB/s"
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return path


def test_everything_that_can_be_said_of_a_cluster_is_read(tmp_path: Path) -> None:
    cluster = read_cluster(written(tmp_path, WHOLE))
    assert cluster.required_model == tmp_path / "models/olmoe.gguf"
    clinic, lab, ward = cluster.servers
    assert (clinic.address, clinic.port, clinic.peer_port) == ("10.0.0.1", 8080, 9080)
    assert (lab.address, lab.port, lab.peer_port) == ("127.0.0.1", 0, 0)
    assert clinic.device_bytes(1000) == (1 << 30, 1 << 30)
    assert lab.device_bytes(1000) == (1 << 30, 100)
    assert ward.device_bytes(1000) == (100,) * 4
    assert cluster.index("lab") == 1
    assert (cluster.rows, cluster.endpoints) == ("f32", config.Endpoints())
    np.testing.assert_array_equal(cluster.bandwidths, [[np.inf, 60e6, 62.5e6], [60e6, np.inf, 62.5e6],
                                                       [62.5e6, 62.5e6, np.inf]])
    np.testing.assert_array_equal(cluster.latencies, 1e-3 * (1 - np.eye(3)))


def test_the_text_in_the_documentation_is_an_example_that_is_read(tmp_path: Path) -> None:
    small, example = (block.partition("```")[0] for block in (
        Path(__file__).parents[2] / "docs/reference/cluster.md").read_text().split("```toml\n")[1:])
    assert read_cluster(written(tmp_path, small)).names == ("a",)
    cluster = read_cluster(written(tmp_path, example))
    assert cluster.names == ("clinic", "lab") and cluster.rows == "bf16"
    assert cluster.endpoints == config.Endpoints(tmp_path / "keys.txt", True)


def test_what_servers_say_to_each_other_is_private_or_said_not_to_be(tmp_path: Path) -> None:
    with pytest.raises(PyorchError, match=r"server clinic is at 10.0.0.1, .* could be read on the way: .*plain = true"):
        read_cluster(written(tmp_path, WHOLE)).check_privacy()
    read_cluster(written(tmp_path, WHOLE.replace("10.0.0.1", "127.0.0.2"))).check_privacy()
    read_cluster(written(tmp_path, WHOLE.replace("10.0.0.1", "localhost"))).check_privacy()
    read_cluster(written(tmp_path, WHOLE.replace("[network]", "[network]\nplain = true"))).check_privacy()
    files = '[tls]\ncertificate = "of/all.pem"\nkey = "/etc/all.key"\nauthority = "authority.pem"\n[network]'
    cluster = read_cluster(written(tmp_path, WHOLE.replace("[network]", files).replace(
        'name = "lab"', 'name = "lab"\ntls = { certificate = "lab.pem" }')))
    cluster.check_privacy()
    clinic, lab, _ = (server.tls for server in cluster.servers)
    assert clinic.certificate == tmp_path / "of/all.pem" and clinic.key == Path("/etc/all.key")
    assert (lab.certificate, lab.key, lab.authority) == (tmp_path / "lab.pem", clinic.key, clinic.authority)
    assert cluster.reads and not read_cluster(written(tmp_path, 'read = "last"\n' + WHOLE)).reads


def test_little_has_to_be_said(tmp_path: Path) -> None:
    cluster = read_cluster(written(tmp_path, '[[server]]\nname = "a"\nmemory = "1GiB"\n'))
    assert cluster.link("a", "b") == config.Link() and cluster.servers[0].n_devices == 1
    with pytest.raises(PyorchError, match="names no model"):
        _ = cluster.required_model
    with pytest.raises(PyorchError, match='no server "b": it has a'):
        cluster.index("b")


@pytest.mark.parametrize(("old", "new", "sentence"), [
    ('name = "lab"', "", r"\[\[server\]\] 2: name is missing"),
    ('name = "lab"', 'name = "clinic"', 'two servers have the name "clinic"'),
    ("port = 8080", f"port = 0x{'f' * 5000}", "port is of more than .* digits, not a whole number from 0 to 65535"),
    ('name = "lab"', f"name = 0x{'f' * 5000}", "name is of more than .* digits, not a text"),
    ('name = "lab"', 'name = "a lab"', '"a lab" is not made of letters'),
    ('memory = "40%"', "", r"\[\[server\]\] 3: memory is missing"),
    ('memory = "40%"', 'memroy = "40%"', r'3: memory is missing, and "memroy" is not known'),
    ('memory = "40%"', 'memory = "much"', r'3: memory "much" is neither a size such as "2GiB" nor a share'),
    ('memory = "40%"', "memory = 0.4", r"memory is 0.4, not a text or a whole number or a list"),
    ('memory = "40%"', "memory = []", "memory names 0 devices"),
    ('memory = "40%"\ndevices = 4', "memory = []", "memory names 0 devices, where there are 1"),
    ('memory = "40%"', "memory = 1125899906842625", "memory 1125899906842625 is more than 1 PiB"),
    ('memory = "40%"', 'memory = "99999999999999999999%"', 'memory "9{20}%" is more than 1 PiB, or 100 times all'),
    ("devices = 2", "devices = 0", "devices is 0, not a whole number from 1 to 4096"),
    ("devices = 2", "devices = true", "devices is True, not a whole number"),
    ("devices = 2", "device = 2", r'"device" is not known: did you mean devices\? name, address, model, memory, '
                                  'devices, port, peer_port, tls are'),
    ("[network]", 'read = "always"\n[network]', 'read is "always", not "faster" or "last"'),
    ("[network]", "[network]\nplain = 1", "plain is 1, not true or false"),
    ("[network]", '[tls]\ncertificate = "a"\n[network]', r"1: tls names no key: it needs certificate, key, authority"),
    ("[network]", '[tls]\ncertificates = "a"\n[network]',
     r'tls\]: "certificates" is not known: did you mean certificate\?'),
    ('name = "lab"', 'name = "lab"\ntls = { certificate = "a", key = "b", authority = "c" }',
     "server clinic has no tls, and others have"),
    ('["1GiB", "10%"]', '["1GiB"]\ndevices = 2', "memory names 1 devices, where there are 2"),
    ("port = 8080", "port = 99999", "port is 99999, not a whole number from 0 to 65535"),
    ("port = 8080", "port = 9080", "port 9080 of 10.0.0.1 is named twice"),
    ("500Mbit/s", "fast", 'bandwidth "fast" is not one such as "500Mbit/s"'),
    ("1ms", "1 hour", 'latency "1 hour" is not one such as "1ms"'),
    ('["lab", "clinic"]', '["lab", "attic"]', "not two of the servers clinic, lab, ward-3"),
    ('["lab", "clinic"]', '["lab", "lab"]', "not two of the servers"),
    ('[[link]]', '[[link]]\nbetween = ["clinic", "lab"]\n[[link]]', r"link\]\] 2: there is another link between"),
    ("[[server]]", "[server", "is not TOML"),
    ("[network]", "[net]",
     r'"net" is not known: did you mean network\? model, read, network, tls, server, link, endpoints, '
                          'scheduler are'),
    ("[network]", '[network]\nrows = "f16"', r'network\]: rows is "f16", not "f32" or "bf16"'),
    ("[network]", "[endpoints]\ntls = true\n[network]", r"endpoints\]: tls = true needs keys, a file of API keys"),
    ("[network]", '[endpoints]\nkeys = "keys"\ntls = true\n[network]', r"endpoints\] says tls = true, without certif"),
    ("[network]", '[endpoints]\nkey = "keys"\n[network]', r'"key" is not known: did you mean keys\?'),
])
def test_a_mistake_is_a_sentence_with_its_place(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    assert old in WHOLE
    path = written(tmp_path, WHOLE.replace(old, new))
    with pytest.raises(FormatError, match=sentence) as error:
        read_cluster(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


def test_a_file_without_servers_or_none_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="server is missing"):
        read_cluster(written(tmp_path, ""))
    with pytest.raises(FormatError, match="has no server"):
        read_cluster(written(tmp_path, "server = []"))
    with pytest.raises(FormatError, match="cannot be read: No such file"):
        read_cluster(tmp_path / "absent.toml")


@given(place=st.integers(0, len(WHOLE) - 1), text=st.text(max_size=3))
def test_no_damage_is_a_crash(tmp_path_factory: pytest.TempPathFactory, place: int, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.toml"
    path.write_text(WHOLE[:place] + text + WHOLE[place + 1 :], encoding="utf-8", errors="replace")
    try:
        read_cluster(path)
    except FormatError as error:
        assert "\n" not in str(error)
