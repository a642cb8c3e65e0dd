#!/usr/bin/env python3
"""The fold rule of fold/README.md: keeps every event of Postrider's nodes once, in SQLite, and derives the rest.

    fold.py DB /NODE/TENANT/RUN      shows a run from the database of consumer.py, as `postrider fold show RUN -o json` does
"""
import hashlib, json, re, sqlite3, sys
from datetime import datetime, timedelta

SCHEMA = """PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;
-- Each content that came, once. The key is (source, lsn): of two rows under one key one is a mark, or it is a conflict.
CREATE TABLE IF NOT EXISTS record (source TEXT, lsn INTEGER, mark INTEGER, hash TEXT, prevlsn INTEGER, epoch INTEGER,
  gen INTEGER, type TEXT, data TEXT, PRIMARY KEY (source, lsn, mark, hash, prevlsn));
-- What counts, one row a key: a record before a mark, then the smaller hash.
CREATE VIEW IF NOT EXISTS event AS SELECT * FROM (
  SELECT *, row_number() OVER (PARTITION BY source, lsn ORDER BY mark, hash, prevlsn) AS place FROM record) WHERE place = 1;
-- What is no event. It is acknowledged like the rest, since the next delivery would be no better.
CREATE TABLE IF NOT EXISTS odd (topic TEXT, payload BLOB, PRIMARY KEY (topic, payload))"""
SPACE, VALUE = re.compile(r"[ \t\r\n]*").match, json.JSONDecoder(parse_int=str, parse_float=str).raw_decode


def connect(path):
    db = sqlite3.connect(path)
    db.executescript(SCHEMA)
    return db


def attributes(text):
    """The envelope, with data as it is written: json.loads and json.dumps would make 1.0 of 1.00."""
    json.loads(text, parse_int=str, parse_float=str)  # raises unless all of it is JSON
    found, at = {}, SPACE(text, 0).end()
    while text[at] != "}":
        name, at = VALUE(text, SPACE(text, at + 1).end())
        start = SPACE(text, SPACE(text, at).end() + 1).end()  # after the colon
        value, at = VALUE(text, start)
        found[name], at = text[start:at] if name == "data" else value, SPACE(text, at).end()
    return found


def fold(db, topic, payload):
    """Stores one message, once. When this returns it is on the disk; when this raises, it is not."""
    try:
        e, (tenant, kind, _, node, run) = attributes(payload.decode()), topic.split("/")[-5:]
        lsn, prevlsn, epoch, gen = (int(e[name]) for name in ("id", "prevlsn", "nodeepoch", "branchgen"))
        if kind != "events" or e["source"].rpartition("/")[0] != f"/{node}/{tenant}/{run}" or "toagent" in e:
            raise ValueError("no event of the topic it came on")
        if e["type"] == "postrider.branch.opened" and json.loads(e["data"])["fork_lsn"] != lsn - 1:
            raise ValueError("no opening of its branch")
        time = datetime.strptime(e["time"], "%Y-%m-%dT%H:%M:%S.%fZ") - datetime(1970, 1, 1)
        content = e["type"], e.get("subject") or "", str(time // timedelta(microseconds=1)), "", e["data"]
        hashed = hashlib.sha256(b"".join(len(b).to_bytes(8, "big") + b for b in map(str.encode, content))).hexdigest()
        row = e["source"], lsn, e["type"] == "postrider.record.dead", hashed, prevlsn, epoch, gen, e["type"], e["data"]
        with db:  # one transaction
            new = db.execute("INSERT INTO record VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", row).rowcount
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as why:  # none of SQLite's
        with db:
            db.execute("INSERT INTO odd VALUES (?, ?) ON CONFLICT DO NOTHING", (topic, payload))
        return print(f"set aside: {topic}: {why!r}", file=sys.stderr)
    contents, = db.execute("SELECT count(*) FROM record WHERE source = ? AND lsn = ? AND NOT mark", row[:2]).fetchone()
    if new and contents > 1 and not row[2]:
        print(f"CONFLICT: {contents} contents under {e['source']} {lsn}", file=sys.stderr)


def lineage(db, run):
    """The live branch, "" if there is none, and (source, lsn, type, data) of its events up to the first gap."""
    def select(columns, where, *values):
        return db.execute(f"SELECT {columns} FROM {where}", values).fetchall()

    node, all_of_it = f"/{run.split('/')[1]}/*", f"{run}/*"
    (newest,), = select("max(epoch)", "record WHERE source GLOB ?", node)
    branches = {source: rest for source, *rest in
                select("source, max(epoch), max(gen), min(lsn)", "record WHERE source GLOB ? GROUP BY source", all_of_it)}
    # Of several openings of a branch the smallest (lsn, hash) counts: it comes last.
    opened = {source: json.loads(data) for source, data in select(
        "source, data", "record WHERE source GLOB ? AND type = 'postrider.branch.opened' ORDER BY lsn DESC, hash DESC", all_of_it)}
    known = [(epoch, gen, source) for source, (epoch, gen, first) in branches.items() if first == 1 or source in opened]
    known = [branch for branch in known if branch[0] == newest]  # a restore abandons what it does not go on with
    live = source = max(known)[2] if known else ""

    pieces, end = [], 1 << 62  # the part (start, end] of each branch, the root's first
    while source:
        fork = opened.get(source, {"fork_lsn": 0})
        pieces.insert(0, (source, fork["fork_lsn"], end))
        end, parent = min(end, fork["fork_lsn"]), f"{run}/{fork.get('parent')}"
        source = parent if parent in branches and branches[parent][1] < branches[source][1] else ""

    shown, last = [], 0
    for piece in pieces:
        for lsn, prevlsn, kind, data in select(
                "lsn, prevlsn, type, data", "event WHERE source = ? AND lsn > ? AND lsn <= ? ORDER BY lsn", *piece):
            if prevlsn != last:
                return live, shown  # a gap: what follows it waits
            shown.append((piece[0], lsn, kind, data))
            last = lsn
    return live, shown


def show(db, run):
    """One line of JSON, with the data of each event as it came."""
    text = lambda s: json.dumps(s, ensure_ascii=False)
    branch = lambda source: text(source.rpartition("/")[2])
    live, events = lineage(db, run)
    records = ",".join(f'{{"branch":{branch(source)},"lsn":{lsn},"type":{text(kind)},"data":{data}}}'
                       for source, lsn, kind, data in events)
    _, node, tenant, name = map(text, run.split("/"))
    return (f'{{"tenant":{tenant},"node":{node},"run":{name},"branch":{branch(live)},'
            f'"lsn":{events[-1][1] if events else 0},"records":[{records}]}}')


if __name__ == "__main__":
    path, run = sys.argv[1:] if len(sys.argv) == 3 else sys.exit(__doc__)
    print(show(sqlite3.connect(f"file:{path}?mode=ro", uri=True), run))
