"""A URL of a namespace is read as it was written, and one that is wrong says what is wrong with it."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidArgument
from penstock.storage.nvme.namespace import this_host
from penstock.storage.nvme.url import Portal, Url, is_url, parse_portal, parse_url

# Letters of any language, and what URLs have their own use for; no spaces or control characters.
names = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Z"]) | st.sampled_from("/?#&=%+:@"),
    min_size=1,
    max_size=60,
).filter(lambda name: len(name.encode()) <= 223)
hosts = st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True) | st.ip_addresses().map(str)
urls = st.builds(
    Url,
    host=hosts,
    port=st.integers(1, 65535),
    subsystem_nqn=names,
    namespace=st.integers(1, 0xFFFFFFFE),
    header_digest=st.booleans(),
    data_digest=st.booleans(),
    queues=st.integers(1, 64),
    depth=st.integers(1, 1023),
    takeover=st.booleans(),
    encrypt=st.none() | st.booleans(),
    host_nqn=st.none() | names,
    fragment=st.just("") | names,
)


@given(urls)
def test_what_is_written_is_read(url: Url) -> None:
    text = str(url)
    assert is_url(text)
    assert parse_url(text) == url
    assert parse_portal(text) == url.portal
    assert parse_portal(str(url.portal)) == url.portal


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("[::1]", True),
        ("localhost", True),
        ("LocalHost", True),
        ("10.0.0.7", False),
        ("0.0.0.0", False),
        ("[fe80::1%eth0]", False),
        ("localhost.example", False),
        ("127.0.0.1.example", False),
    ],
)
def test_what_is_on_this_machine(host: str, here: bool) -> None:
    assert parse_url(f"nvme+tcp://{host}/nqn?ns=1").portal.is_here == here


def test_every_part_has_its_place() -> None:
    url = parse_url(
        "NVME+TCP://[fe80::1%eth0]/nqn.2014-08.org.example:a/b%20c".replace("%20", "%3F")
        + "?ddgst=1&ns=3&queues=4&depth=32&hostnqn=nqn.me#part-00000-of-00002"
    )
    assert url == Url(
        host="fe80::1%eth0",
        port=4420,
        subsystem_nqn="nqn.2014-08.org.example:a/b?c",
        namespace=3,
        data_digest=True,
        queues=4,
        depth=32,
        host_nqn="nqn.me",
        fragment="part-00000-of-00002",
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nvme+tls://host/nqn?ns=1", "asks for TLS"),
        ("nvme+rdma://host/nqn?ns=1", "nvme+rdma://, which penstock does not speak"),
        ("s3://bucket/store", "s3://, which penstock does not speak"),
        ("nvme+tcp:/host/nqn?ns=1", "lost a slash"),
        ("nvme+tcp:///nqn?ns=1", "names no host"),
        ("nvme+tcp://:4420/nqn?ns=1", "names no host"),
        ("nvme+tcp://ho st/nqn?ns=1", "neither a name nor an address"),
        ("nvme+tcp://user@host/nqn?ns=1", "user name"),
        ("nvme+tcp://::1/nqn?ns=1", "without brackets"),
        ("nvme+tcp://[::1/nqn?ns=1", "no IPv6 address between its brackets"),
        ("nvme+tcp://[host]/nqn?ns=1", "no IPv6 address between its brackets"),
        ("nvme+tcp://[::1]x/nqn?ns=1", "something other than a port"),
        ("nvme+tcp://host:/nqn?ns=1", "port="),
        ("nvme+tcp://host:0/nqn?ns=1", "port=0: it is a number from 1 to 65535"),
        ("nvme+tcp://host:65536/nqn?ns=1", "port=65536"),
        ("nvme+tcp://host:٣/nqn?ns=1", "port=٣"),
        ("nvme+tcp://host", "names no subsystem"),
        ("nvme+tcp://host/?ns=1", "names no subsystem"),
        ("nvme+tcp://host/nqn", "names no namespace"),
        ("nvme+tcp://host/nqn?ns", "gives ns no value"),
        ("nvme+tcp://host/nqn?ns=0", "ns=0: it is a number from 1 to 4294967294"),
        ("nvme+tcp://host/nqn?ns=4294967295", "ns=4294967295"),
        ("nvme+tcp://host/nqn?ns=1&ns=2", "gives ns twice"),
        ("nvme+tcp://host/nqn?ns=1&speed=9", "option 'speed'"),
        ("nvme+tcp://host/nqn?ns=1&hdgst=yes", "hdgst=yes: it is 0 or 1"),
        ("nvme+tcp://host/nqn?ns=1&queues=0", "queues=0"),
        ("nvme+tcp://host/nqn?ns=1&depth=5000", "depth=5000"),
        ("nvme+tcp://host/nqn?ns=1#", "empty fragment"),
        ("nvme+tcp://host/nq%20n?ns=1", "a space or a control character"),
        ("nvme+tcp://host/nqn%00?ns=1", "a space or a control character"),
        ("nvme+tcp://host/nqn%FF?ns=1", "not UTF-8"),
        ("nvme+tcp://host/" + "n" * 224 + "?ns=1", "224 bytes"),
        ("", "is not a URL"),
    ],
)
def test_each_mistake_is_named(text: str, problem: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        parse_url(text)
    assert problem in str(raised.value)
    assert repr(text) in str(raised.value)


@given(st.text(max_size=80) | st.text("nvme+tcp:/[]?#&=%@ 1ahost.", max_size=60))
def test_nothing_else_is_raised(text: str) -> None:
    for parse in (parse_url, parse_portal):
        try:
            parse(text)
        except InvalidArgument as error:
            assert len(str(error)) < 1000


def test_paths_are_no_urls() -> None:
    for path in ("/data/store", "store", "nvme+tcp", "a:b", "c:/store", Path("/data/s3:/store"), "./s3:/x"):
        assert not is_url(path)
    for url in ("nvme+tcp://host/nqn", Path("nvme+tcp://host/nqn"), "s3://bucket"):
        assert is_url(url)


def test_portals_need_no_more_than_a_host() -> None:
    assert parse_portal("host") == Portal("host", 4420)
    assert parse_portal("[::1]:9") == Portal("::1", 9)
    assert parse_portal("nvme+tcp://host:9") == Portal("host", 9)
    assert str(Portal("::1", 9)) == "[::1]:9"


def test_the_machine_has_one_identity(tmp_path: Path) -> None:
    own = this_host(root=tmp_path)
    assert own == this_host(root=tmp_path)
    assert own.nqn == f"nqn.2014-08.org.nvmexpress:uuid:{uuid.UUID(bytes=own.identifier)}"
    (tmp_path / "etc/nvme").mkdir(parents=True)
    (tmp_path / "etc/machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    made = this_host(root=tmp_path)
    assert made == this_host(root=tmp_path) != own
    identifier = uuid.UUID(int=7)
    (tmp_path / "etc/nvme/hostid").write_text(f"{identifier}\n")
    assert this_host(root=tmp_path).identifier == identifier.bytes
    (tmp_path / "etc/nvme/hostnqn").write_text("nqn.2014-08.org.example:me\n")
    assert this_host(root=tmp_path) == ("nqn.2014-08.org.example:me", identifier.bytes)
    other = this_host("nqn.other", tmp_path)
    assert other.nqn == "nqn.other"
    assert other.identifier not in (identifier.bytes, bytes(16))
