"""Gathers public English text for pretraining, beside the embedded corpus.

    python tests/benchmarks/public_text.py --out DIR

Manuals of Debian packages and descriptions of two PyPI wheels, all under licences that
allow changed copies (see `MANUALS` and `WHEELS`), and the descriptions of Debian's
packages. A section is a document: its heading, then its paragraphs; code and tables are
left out, and so is a section that was there before, and any sentence that is a query of
the embedded benchmark. Needs Debian's and PyPI's registries, `apt-get` and `dpkg-deb`;
downloads are kept under DIR. Writes DIR/text.jsonl, for
`tfdpsq pretrain --config.texts=DIR/text.jsonl`, and prints one JSON line.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html.parser
import json
import pathlib
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator

from tfdpsq.data import BeirDirectory
from tfdpsq.data.pydocs import build_pydocs
from tfdpsq.data.recurrence import Sentences

# Debian package -> licence, and which of its files are prose rather than listings.
MANUALS = {
    "apache2-doc": ("Apache-2.0", r"manual/en/.*\.html$"),
    "cmake-doc": ("BSD-3-Clause", r"/html/(?!_sources).*\.html$"),
    "debian-handbook": ("GPL-2.0-or-later", r"en-US/.*\.html$"),
    "derby-doc": ("Apache-2.0", r"\.html$"),
    "erlang-doc": ("Apache-2.0", r"\.html$"),
    "ghc-doc": ("BSD-3-Clause", r"\.html$"),
    "groovy-doc": ("Apache-2.0", r"\.html$"),
    "libapache-poi-java-doc": ("Apache-2.0", r"\.html$"),
    "libboost1.81-doc": ("BSL-1.0", r"\.html$"),
    "libreoffice-help-en-us": ("MPL-2.0", r"\.html$"),
    "linux-doc-6.1": ("GPL-2.0", r"\.html$"),
    "llvm-15-doc": ("Apache-2.0", r"/html/(?!_sources).*\.html$"),
    "nodejs-doc": ("MIT", r"\.html$"),
    "opencv-doc": ("Apache-2.0", r"\.html$"),
    "openjdk-17-doc": (
        "GPL-2.0 with Classpath-exception",
        r"/api/(?!.*(index-files|class-use|package-tree|overview|legal)).*\.html$",
    ),
    "perl-doc": ("Artistic-1.0 or GPL-1.0-or-later", r"\.pod$"),
    "postgresql-doc-15": ("PostgreSQL", r"\.html$"),
    "python-django-doc": ("BSD-3-Clause", r"/html/(?!_sources|_modules).*\.html$"),
    "python-sqlalchemy-doc": ("MIT", r"/html/(?!_sources|_modules).*\.html$"),
    "python3.11-doc": ("PSF-2.0", r"/html/(?!_sources).*\.html$"),
    "racket-doc": ("MIT or Apache-2.0", r"\.html$"),
    "rust-doc": (
        "MIT or Apache-2.0",
        r"/html/(book|reference|nomicon|cargo|rustc|edition-guide|rust-by-example|"
        r"error_codes|unstable-book|rustdoc|embedded-book|std|core|alloc)/"
        r"(?!.*(/index|src/|all\.html)).*\.html$",
    ),
    "scala-doc": ("Apache-2.0", r"\.html$"),
    "sqlite3-doc": ("public domain", r"\.html$"),
    "zsh-doc": ("MIT-like", r"\.html$"),
}
WHEELS = {
    "botocore": ("Apache-2.0", r"service-2\.json(\.gz)?$"),
    "google-api-python-client": ("Apache-2.0", r"documents/.*\.json$"),
}
# Of one source: descriptions of web services would otherwise be half of all text.
MOST_BYTES = 24_000_000
LEAST_WORDS = 20

_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "dt")
_BLOCKS = (*_HEADINGS, "p", "li", "dd", "div", "section", "br", "blockquote")
_SKIPPED = ("script", "style", "pre", "table", "nav", "footer", "header", "head")
_WORD = re.compile(r"[\"'(]*[A-Za-z][a-z]*(?:['-][A-Za-z]+)*[.,;:!?\"')]*")


class Sections(html.parser.HTMLParser):
    """Cuts a page at its headings."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.sections: list[tuple[str, list[str]]] = [("", [])]
        self._skipped: list[str] = []
        self._heading = False
        self._text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        """Begins a block, a heading or what is left out."""
        if tag in _SKIPPED:
            self._skipped.append(tag)
        if tag in _BLOCKS:
            self._flush()
            self._heading = tag in _HEADINGS

    def handle_endtag(self, tag: str) -> None:
        """Ends it."""
        if self._skipped and tag == self._skipped[-1]:
            self._skipped.pop()
        if tag in _BLOCKS:
            self._flush()
            self._heading = False

    def handle_data(self, data: str) -> None:
        """Collects text."""
        if not self._skipped:
            self._text.append(data)

    def close(self) -> None:
        """Ends the last block."""
        super().close()
        self._flush()

    def _flush(self) -> None:
        text = " ".join("".join(self._text).split()).replace("\u00b6", "")
        self._text = []
        if not text:
            return
        if self._heading:
            self.sections.append((text, []))
        else:
            self.sections[-1][1].append(text)


def sections_of_html(text: str) -> Iterator[tuple[str, str]]:
    """Yields the headings of a page with their paragraphs."""
    parser = Sections()
    parser.feed(text)
    parser.close()
    for heading, paragraphs in parser.sections:
        yield heading, "\n\n".join(paragraphs)


def sections_of_pod(text: str) -> Iterator[tuple[str, str]]:
    """Yields the headings of a Perl manual with their paragraphs."""
    text = re.sub(r"[A-Z]<<*\s*([^<>|]*\|)?([^<>]*?)\s*>>*", r"\2", text)
    for part in re.split(r"^=(?:head\d|item)\s+", text, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        paragraphs = (" ".join(p.split()) for p in _prose_of_pod(body))
        yield heading.strip("* "), "\n\n".join(paragraphs)


def _prose_of_pod(body: str) -> Iterator[str]:
    for paragraph in body.split("\n\n"):
        if paragraph.strip() and not paragraph.startswith((" ", "\t", "=")):
            yield paragraph


def sections_of_service(text: str) -> Iterator[tuple[str, str]]:
    """Yields names and descriptions out of the JSON that describes a web service."""

    def walk(node, name: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, dict):
            for key in ("documentation", "description"):
                if isinstance(node.get(key), str):
                    found = list(sections_of_html(node[key]))
                    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
                    yield words, "\n\n".join(body for _, body in found)
            for key, value in node.items():
                yield from walk(value, key)
        elif isinstance(node, list):
            for value in node:
                yield from walk(value, name)

    yield from walk(json.loads(text), "")


def sections_of_packages(text: str) -> Iterator[tuple[str, str]]:
    """Yields synopsis and description of Debian's packages."""
    for block in text.split("\n\n"):
        _, _, described = block.partition("\nDescription-en: ")
        synopsis, _, body = described.partition("\n")
        paragraphs = re.split(r"^ \.$", body, flags=re.MULTILINE)
        yield synopsis, "\n\n".join(" ".join(p.split()) for p in paragraphs)


_BY_KIND = {
    "html": sections_of_html,
    "pod": sections_of_pod,
    "json": sections_of_service,
}


def _read(name: str, data: bytes) -> Iterator[tuple[str, str]]:
    if name.endswith(".gz"):
        name, data = name.removesuffix(".gz"), gzip.decompress(data)
    kind = name.rpartition(".")[2]
    yield from _BY_KIND[kind](data.decode("utf-8", "replace"))


def of_manual(package: str, pattern: str, cache: pathlib.Path) -> Iterator:
    """Yields the sections of a Debian package, downloaded once."""
    if not list(cache.glob(f"{package}_*.deb")):
        subprocess.run(["apt-get", "-q", "download", package], cwd=cache, check=True)
    (archive,) = cache.glob(f"{package}_*.deb")
    with subprocess.Popen(
        ["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE
    ) as process:
        with tarfile.open(fileobj=process.stdout, mode="r|") as files:
            for entry in files:
                if entry.isfile() and re.search(pattern, entry.name):
                    yield from _read(entry.name, files.extractfile(entry).read())


def of_wheel(package: str, pattern: str, cache: pathlib.Path) -> Iterator:
    """Yields the sections of a wheel, downloaded once."""
    start = package.replace("-", "_")
    if not list(cache.glob(f"{start}-*.whl")):
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", package],
            cwd=cache,
            check=True,
        )
    (archive,) = cache.glob(f"{start}-*.whl")
    with zipfile.ZipFile(archive) as files:
        for name in sorted(files.namelist()):
            if re.search(pattern, name):
                yield from _read(name, files.read(name))


def of_descriptions() -> Iterator[tuple[str, str]]:
    """Yields the descriptions of Debian's packages."""
    subprocess.run(
        ["apt-get", "-qq", "-o", "Acquire::Languages=en", "update"], check=True
    )
    for path in sorted(pathlib.Path("/var/lib/apt/lists").glob("*Translation-en*")):
        read = subprocess.run(
            ["/usr/lib/apt/apt-helper", "cat-file", path],
            check=True,
            stdout=subprocess.PIPE,
        )
        yield from sections_of_packages(read.stdout.decode("utf-8", "replace"))


def sources(cache: pathlib.Path) -> Iterator[tuple[str, str, Iterator]]:
    """Yields name, licence and sections of each source."""
    for package, (licence, pattern) in MANUALS.items():
        yield package, licence, of_manual(package, pattern, cache)
    for package, (licence, pattern) in WHEELS.items():
        yield package, licence, of_wheel(package, pattern, cache)
    yield "debian-descriptions", "as each package's", of_descriptions()


def _prose(body: str) -> str:
    """Leaves out paragraphs that are types, menus or other bits of no sentence."""
    return "\n\n".join(
        paragraph
        for paragraph in body.split("\n\n")
        if len(words := paragraph.split()) >= 6
        and sum(bool(_WORD.fullmatch(word)) for word in words) >= 0.7 * len(words)
    )


def write(out: pathlib.Path, benchmark: BeirDirectory) -> dict:
    """Writes DIR/text.jsonl.

    Returns:
      Documents and bytes of each source.
    """
    queries = Sentences(benchmark.queries().values())
    cache = out / "downloads"
    cache.mkdir(parents=True, exist_ok=True)
    seen: set[bytes] = set()
    counts = {}
    with open(out / "text.jsonl", "w", encoding="utf-8") as file:
        for name, licence, sections in sources(cache):
            documents = size = 0
            for title, body in sections:
                body = _prose(body)
                if len(body.split()) < LEAST_WORDS:
                    continue
                key = hashlib.sha1(re.sub(r"\W+", "", body).encode()).digest()[:8]
                if key in seen:
                    continue
                seen.add(key)
                # The heading is a line of the text: then it may be a pseudo-query.
                text = queries.without(f"{title}\n\n{body}").strip()
                if size + len(text.encode()) > MOST_BYTES:
                    break
                size += len(text.encode())
                line = {"_id": f"{name}-{documents}", "text": text}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                documents += 1
            counts[name] = {"licence": licence, "documents": documents, "bytes": size}
            print(name, counts[name], file=sys.stderr)
    return counts


def main() -> None:
    """Gathers the text and prints the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    out = parser.parse_args().out.resolve()
    start = time.monotonic()
    counts = write(out, build_pydocs())
    total = {k: sum(c[k] for c in counts.values()) for k in ("documents", "bytes")}
    seconds = round(time.monotonic() - start, 1)
    print(json.dumps({**total, "seconds": seconds, "sources": counts}))


if __name__ == "__main__":
    main()
