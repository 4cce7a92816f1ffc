"""Images come from where the caller allows, within its limits, or a ValueError says what was wrong."""

import base64
import io
import os
import shutil
import ssl
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image

from jpaged import image_sources
from jpaged.image_sources import MediaUrl
from jpaged.images import ImageSources, LowDetail, read_images
from jpaged.images import sources as sources_module
from jpaged.images.pixels import decoded
from jpaged.images.web import is_private


def encoded(size=(9, 7), kind="PNG", seed=0, **options):
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def data_url(data, media="image/png"):
    return f"data:{media};base64,{base64.b64encode(data).decode()}"


class Site(BaseHTTPRequestHandler):
    """A host of pictures and of traps."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        png, media, status, headers = encoded(), "image/png", 200, {}
        if self.path == "/large":
            png += bytes(5000)
        if self.path in ("/text", "/untyped"):
            media = {"/text": "text/html", "/untyped": "Binary/Octet-Stream; x=y"}[self.path]
        if self.path == "/gone":
            status = 404
        if self.path == "/loop":
            status, headers = 302, {"Location": "/loop"}
        if self.path == "/moved":
            status, headers = 302, {"Location": "/ok?size=1"}
        if self.path == "/away":
            status, headers = 302, {"Location": "http://other.example/ok"}
        if self.path == "/inside":
            status, headers = 302, {"Location": "http://127.0.0.1:1/ok"}
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Type", media)
        if self.path == "/endless":
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(len(png) + (self.path == "/short")))
        self.end_headers()
        if self.path == "/slow":
            for byte in png:
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                time.sleep(0.05)
        elif self.path == "/endless":
            self.wfile.write(bytes(10_000))
        else:
            self.wfile.write(png)
        self.close_connection = True

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_pil_image_a_data_url_and_a_file_are_one_picture(tmp_path):
    data = encoded()
    (tmp_path / "a b.png").write_bytes(data)
    sources = ImageSources(folders=[tmp_path])
    pil = Image.open(io.BytesIO(data))
    url = (tmp_path / "a b.png").as_uri()
    pictures = read_images([pil, data_url(data), str(tmp_path / "a b.png"), tmp_path / "a b.png", url], sources)
    assert len({picture.digest for picture in pictures}) == 1
    assert pictures[0].size == (7, 9)
    assert not pictures[0].pixels.flags.writeable


def test_one_image_need_not_be_a_list():
    assert len(read_images(data_url(encoded()), ImageSources())) == 1


def test_too_many_images_are_refused_before_any_is_read():
    with pytest.raises(ValueError, match="3 images were given, the limit is max_images=2"):
        read_images(["nowhere"] * 3, ImageSources(max_images=2))


def test_the_pixels_of_all_images_are_limited_before_the_one_too_many_is_decoded(monkeypatch):
    pictures = [data_url(encoded((10, 8))), Image.new("RGB", (5, 4)), data_url(encoded((10, 10)))]
    assert len(read_images(pictures, ImageSources(max_total_pixels=200))) == 3
    message = "image 3 of 3, .* has 10 x 10 pixels, which makes 200 with .*, the limit is max_total_pixels=199"
    with pytest.raises(ValueError, match=message):
        read_images(pictures, ImageSources(max_total_pixels=199))
    monkeypatch.setattr(Image.Image, "convert", None)
    with pytest.raises(ValueError, match=r"image 1 of 1, a PIL image has 5 x 4 pixels, .*max_total_pixels=19"):
        read_images(pictures[1], ImageSources(max_total_pixels=19))


def test_local_files_need_a_named_folder(tmp_path):
    (tmp_path / "x.png").write_bytes(encoded())
    with pytest.raises(ValueError, match=r"image 1 of 1, '.*x.png' is a local file, and .*folders=\(\)\) names no"):
        read_images(str(tmp_path / "x.png"), ImageSources())


@pytest.mark.parametrize("trick", ["dots", "link", "folder link", "prefix", "missing outside"])
def test_paths_do_not_lead_out_of_the_folders(trick, tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "in-not"
    inside.mkdir()
    outside.mkdir()
    (outside / "x.png").write_bytes(encoded())
    (inside / "link.png").symlink_to(outside / "x.png")
    (inside / "sub").symlink_to(outside)
    path = {
        "dots": inside / ".." / "in-not" / "x.png",
        "link": inside / "link.png",
        "folder link": inside / "sub" / "x.png",
        "prefix": outside / "x.png",
        "missing outside": outside / "no.png",
    }[trick]
    with pytest.raises(ValueError, match="is not in folders="):
        read_images(str(path), ImageSources(folders=[inside]))


def test_a_link_inside_a_folder_is_followed(tmp_path):
    (tmp_path / "x.png").write_bytes(encoded())
    (tmp_path / "y.png").symlink_to(tmp_path / "x.png")
    assert read_images(tmp_path / "y.png", ImageSources(folders=[tmp_path]))


def test_pipes_folders_and_missing_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    sources = ImageSources(folders=[tmp_path])
    with pytest.raises(ValueError, match="is not a regular file"):
        read_images(tmp_path / "pipe", sources)
    with pytest.raises(ValueError, match=r"could not be read|is not a regular file"):
        read_images(tmp_path, sources)
    with pytest.raises(ValueError, match="could not be read: No such file"):
        read_images(tmp_path / "none.png", sources)
    with pytest.raises(ValueError, match=r"can be followed|could not be read"):
        read_images(f"{tmp_path}/a\0b", sources)


def test_a_file_of_another_host_or_scheme_is_refused(tmp_path):
    with pytest.raises(ValueError, match="file of the host 'server'"):
        read_images("file://server/x.png", ImageSources(folders=[tmp_path]))
    with pytest.raises(ValueError, match="scheme 'ftp', which is not one of"):
        read_images("ftp://server/x.png", ImageSources(folders=[tmp_path]))


@pytest.mark.parametrize("way", ["file", "data"])
def test_too_many_bytes_are_refused(way, tmp_path):
    data = encoded((40, 40))
    (tmp_path / "x.png").write_bytes(data)
    image = tmp_path / "x.png" if way == "file" else data_url(data)
    sources = ImageSources(folders=[tmp_path], max_bytes=len(data) - 1)
    with pytest.raises(ValueError, match=f"has .*{len(data)} bytes, the limit is max_bytes={len(data) - 1}"):
        read_images(image, sources)
    assert read_images(image, ImageSources(folders=[tmp_path], max_bytes=len(data)))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:text/plain;base64,aGk=", "media type 'text/plain', not image"),
        ("data:image/png,hello", "not of the form"),
        ("data:image/png;base64,@@@", "not valid base64"),
        ("data:image/png;base64,aGVsbG8=", "is not an image of PNG, JPEG"),
    ],
)
def test_data_urls_that_are_no_images_are_refused(url, message):
    with pytest.raises(ValueError, match=message):
        read_images(url, ImageSources())


def test_another_type_is_a_type_error():
    with pytest.raises(TypeError, match="image 2 of 2 is a int"):
        read_images([data_url(encoded()), 3], ImageSources())


def test_hosts_are_allowed_by_name_and_port(site):
    assert read_images(f"http://{site}/ok", ImageSources(hosts=[site]))[0].size == (7, 9)
    for hosts in ([], ["127.0.0.1"], ["127.0.0.1:1"], ["example.org"]):
        with pytest.raises(ValueError, match="which is not in hosts="):
            read_images(f"http://{site}/ok", ImageSources(hosts=hosts))
    with pytest.raises(ValueError, match="user name"):
        read_images(f"http://me:pass@{site}/ok", ImageSources(hosts=[site]))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate and key of 127.0.0.1 that nobody but a test trusts."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    folder = tmp_path_factory.mktemp("certificate")
    names = [
        "-out",
        str(folder / "it.crt"),
        "-keyout",
        str(folder / "it.key"),
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    ]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*command, "-subj", "/CN=127.0.0.1", *names], check=True, capture_output=True)
    return folder / "it.crt", folder / "it.key"


def test_https_hosts_must_show_a_trusted_certificate(certificate, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    host = f"127.0.0.1:{server.server_address[1]}"
    try:
        with pytest.raises(ValueError, match="could not be fetched: SSLCertVerificationError"):
            read_images(f"https://{host}/ok", ImageSources(hosts=[host]))
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        assert read_images(f"https://{host}/ok", ImageSources(hosts=[host]))[0].size == (7, 9)
        with pytest.raises(ValueError, match="took longer than timeout"):
            read_images(f"https://{host}/slow", ImageSources(hosts=[host], timeout=0.3))
    finally:
        server.shutdown()
        server.server_close()


def test_a_name_that_leads_to_a_private_address_is_refused_unless_the_address_is_named(site):
    port = site.partition(":")[2]
    with pytest.raises(ValueError, match=r"private address (127.0.0.1|::1), which is not in hosts"):
        read_images(f"http://localhost:{port}/ok", ImageSources(hosts=[f"localhost:{port}"]))
    named = ImageSources(hosts=[f"localhost:{port}", "127.0.0.1", "[::1]"])
    assert read_images(f"http://localhost:{port}/ok", named)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("text", "media type 'text/html', not image"),
        ("gone", "status 404"),
        ("loop", "redirects more than 3 times"),
        ("away", "other.example:80, which is not in hosts"),
        ("inside", "127.0.0.1:1, which is not in hosts"),
        ("large", r"has \d+ bytes, the limit is max_bytes=2000"),
        ("endless", "has more bytes than max_bytes=2000"),
        ("short", "could not be fetched"),
    ],
)
def test_what_a_host_may_not_answer(path, message, site):
    with pytest.raises(ValueError, match=message):
        read_images(f"http://{site}/{path}", ImageSources(hosts=[site], max_bytes=2000))


def test_a_host_that_names_no_kind_of_media_may_send_a_picture(site):
    assert read_images(f"http://{site}/untyped", ImageSources(hosts=[site]))[0].size == (7, 9)


def test_redirects_to_another_allowed_host_are_refused(site):
    with pytest.raises(ValueError, match=r"redirects to another host, 'other.example'"):
        read_images(f"http://{site}/away", ImageSources(hosts=[site, "other.example"]))
    assert read_images(f"http://{site}/moved", ImageSources(hosts=[site]))


def test_a_host_that_trickles_is_left_at_the_timeout(site):
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"took longer than timeout=0.3 seconds"):
        read_images(f"http://{site}/slow", ImageSources(hosts=[site], timeout=0.3))
    assert time.monotonic() - start < 5


def test_private_addresses_are_known_however_they_are_written():
    private = ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "fe80::1%eth0", "::ffff:10.0.0.1", "64:ff9b::a00:1"]
    assert all(is_private(address) for address in [*private, "0.0.0.0", "224.0.0.1", "2002:7f00:1::"])
    assert not any(is_private(address) for address in ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("folders", "/tmp", "must be a list"),
        ("folders", ["/no/such/folder"], "is not a folder"),
        ("hosts", ["http://example.org"], "neither 'host' nor 'host:port'"),
        ("hosts", ["example.org/path"], "neither 'host' nor 'host:port'"),
        ("max_bytes", 0, "max_bytes=0"),
        ("max_images", True, "max_images=True"),
        ("max_total_pixels", 0, "max_total_pixels=0"),
        ("timeout", 0, "timeout=0"),
    ],
)
def test_settings_are_checked(field, value, message):
    with pytest.raises(ValueError, match=message):
        ImageSources(**{field: value})


def test_without_pillow_an_error_says_what_to_install():
    script = (
        "import sys; sys.modules['PIL'] = None\n"
        "from jpaged.images import ImageSources, read_images\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] in ('jax', 'torch', 'transformers')]\n"
        "try: read_images('data:image/png;base64,aGk=', ImageSources())\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 'pip install ".[images]"' in done.stdout


def test_a_picture_is_decoded_once_where_a_conversation_is_rendered_for_several_lengths(monkeypatch):
    decodes = []
    monkeypatch.setattr(sources_module, "decoded", lambda *args: decodes.append(1) or decoded(*args))
    urls = [data_url(encoded(size)) for size in ((4, 3), (5, 3))]
    few = ImageSources(max_total_pixels=20)
    with image_sources.decoded_once():
        for cut in (urls[:1], urls[1:], [LowDetail(urls[1])]):
            first, again = read_images(cut, few)[0], read_images(cut, few)[0]
            assert first is again
        assert len(decodes) == 2
        with pytest.raises(ValueError, match="max_total_pixels=20"):
            read_images(urls, few)
        monkeypatch.setattr(image_sources, "MOST_DECODED_BYTES", 90)
        late = data_url(encoded((2, 2)))
        assert read_images(late, few)[0] is not read_images(late, few)[0], "there is no room for its pixels"
    known = len(decodes)
    read_images(urls[:1], few)
    assert len(decodes) == known + 1


def test_urls_keep_what_they_name_within_a_bound_and_no_data_url_is_copied(monkeypatch):
    monkeypatch.setattr(image_sources, "MOST_KEPT_BYTES", 10)
    data = "data:image/png;base64,AAAA"
    assert MediaUrl.of(data) is data
    fetched: list[str] = []

    def read(url) -> bytes:
        return url.bytes_by(lambda: fetched.append(str(url)) or bytes(6))

    one, other = MediaUrl.of("https://a/1"), MediaUrl.of("HTTP://a/1")
    for url in (one, one, other, other):
        assert read(url) == bytes(6)
    assert fetched == ["https://a/1", "HTTP://a/1", "HTTP://a/1"], "both together are above the bound"
    one.forget()
    read(other)
    read(other)
    assert len(fetched) == 4
    del other, url
    read(one)
    read(one)
    assert len(fetched) == 5
