#!/usr/bin/env python3
"""Make the training, validation and held-out texts from Debian's King James Bible.

    apt-get install bible-kjv        (brings bible-kjv-text; its program is `bible`)
    python3 prepare_text.py --out DIR --excerpt ../text/heldout.txt

The text is in the public domain: the translation is of 1611, and the package's copyright file says that its copyright
has expired. Running text is made of it: one verse a line without its number, a line such as `Genesis 1` before each
chapter and an empty line after it; printable ASCII and newlines alone.

The split is by whole books, contiguous, in the Bible's order:
    train.txt     Genesis to 2 Corinthians              (trained on)
    valid.txt     Galatians to Colossians               (never trained on; chooses the checkpoint and the settings)
    heldout.txt   1 Thessalonians to Revelation, ~5 %   (never trained on, chooses nothing; the figure that is reported)
The excerpt is the start of heldout.txt, cut at the end of a line.
"""
import argparse
import re
import subprocess
import sys
from pathlib import Path

BOOKS = """Ge Genesis|Exo Exodus|Lev Leviticus|Num Numbers|Deu Deuteronomy|Josh Joshua|Jdgs Judges|Ruth Ruth|1Sm 1 Samuel
2Sm 2 Samuel|1Ki 1 Kings|2Ki 2 Kings|1Chr 1 Chronicles|2Chr 2 Chronicles|Ezra Ezra|Neh Nehemiah|Est Esther|Job Job
Psa Psalms|Prv Proverbs|Eccl Ecclesiastes|SSol Song of Solomon|Isa Isaiah|Jer Jeremiah|Lam Lamentations|Eze Ezekiel
Dan Daniel|Hos Hosea|Joel Joel|Amos Amos|Obad Obadiah|Jonah Jonah|Mic Micah|Nahum Nahum|Hab Habakkuk|Zep Zephaniah
Hag Haggai|Zec Zechariah|Mal Malachi|Mat Matthew|Mark Mark|Luke Luke|John John|Acts Acts|Rom Romans|1Cor 1 Corinthians
2Cor 2 Corinthians|Gal Galatians|Eph Ephesians|Phi Philippians|Col Colossians|1Th 1 Thessalonians|2Th 2 Thessalonians
1Tim 1 Timothy|2Tim 2 Timothy|Titus Titus|Phmn Philemon|Heb Hebrews|Jas James|1Pet 1 Peter|2Pet 2 Peter|1Jn 1 John
2Jn 2 John|3Jn 3 John|Jude Jude|Rev Revelation"""
NAMES = dict(entry.split(" ", 1) for line in BOOKS.splitlines() for entry in line.split("|"))
FIRST_OF_PART = {"Ge": "train", "Gal": "valid", "1Th": "heldout"}


def read_verses(program):
    """[(book, chapter, text)] of every verse, in order, as `bible -f` prints them: `Ge1:1 In the beginning ...`."""
    try:
        done = subprocess.run([program, "-f", "gen1:1-rev22:21"], capture_output=True, check=True)
    except FileNotFoundError:
        sys.exit(f"prepare_text.py: no program '{program}': apt-get install bible-kjv (Debian), or name it with --bible")
    except subprocess.CalledProcessError as failure:
        sys.exit(f"prepare_text.py: '{program} -f gen1:1-rev22:21' failed: {failure.stderr.decode(errors='replace')}")
    verses = []
    for number, line in enumerate(done.stdout.decode("ascii").splitlines(), 1):
        match = re.fullmatch(r"(\d?[A-Za-z]+)(\d+):\d+ +(.*\S) *", line)
        if not match or match[1] not in NAMES:
            sys.exit(f"prepare_text.py: line {number} of {program}'s output is not a verse: {line[:80]!r}")
        verses.append((match[1], int(match[2]), match[3]))
    if len(verses) != 31102:
        sys.exit(f"prepare_text.py: {len(verses)} verses where 31102 were expected")
    return verses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for train.txt, valid.txt and heldout.txt")
    parser.add_argument("--excerpt", type=Path, help="also write the first bytes of the held-out text to this file")
    parser.add_argument("--excerpt-bytes", type=int, default=128 * 1024, help="at most so many bytes (default %(default)s)")
    parser.add_argument("--bible", default="bible", help="the program of Debian's bible-kjv (default %(default)s)")
    args = parser.parse_args()

    parts, part, chapter = {}, None, None
    for book, number, text in read_verses(args.bible):
        if (book, number) != chapter:
            part = FIRST_OF_PART.get(book, part) if chapter is None or book != chapter[0] else part
            lines = parts.setdefault(part, [])
            lines += ([""] if lines else []) + [f"{NAMES[book]} {number}"]
            chapter = (book, number)
        lines.append(text)
    args.out.mkdir(parents=True, exist_ok=True)
    encoded = {name: ("\n".join(lines) + "\n").encode("ascii") for name, lines in parts.items()}
    total = sum(map(len, encoded.values()))
    for name, data in encoded.items():
        (args.out / f"{name}.txt").write_bytes(data)
        print(f"{args.out / (name + '.txt')}: {len(data)} bytes ({100 * len(data) / total:.1f} %)")
    if args.excerpt:
        data = encoded["heldout"][:args.excerpt_bytes]
        data = data[:data.rfind(b"\n") + 1]
        args.excerpt.parent.mkdir(parents=True, exist_ok=True)
        args.excerpt.write_bytes(data)
        print(f"{args.excerpt}: {len(data)} bytes")


if __name__ == "__main__":
    main()
