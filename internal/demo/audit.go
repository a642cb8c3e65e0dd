package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"postrider/fold"
	"postrider/internal/record"
	"postrider/internal/sqlite"
	"postrider/outbox"
)

// Figures is what the two databases say. Each committed record is in exactly one of Folded, Withheld, Undone, Escaped and
// Lost; each delivery is either the first of a record, so in Folded, Undone or Escaped, or a duplicate.
type Figures struct {
	Runs       int64  `json:"runs"`
	Committed  int64  `json:"committed"`    // records in the node's outbox
	Folded     int64  `json:"folded"`       // held by the fold exactly once, as committed, and part of the run's live lineage
	Withheld   int64  `json:"withheld"`     // off the live lineage, never shipped, and not at the fold
	Undone     int64  `json:"undone"`       // off the live lineage, sent by the time of the rewind, and at the fold, which does not count them
	Escaped    int64  `json:"escaped"`      // likewise, but sent after the rewind
	Deliveries int64  `json:"deliveries"`   // that the fold took in
	Duplicates int64  `json:"duplicates"`   // of these, those that changed nothing
	OutOfOrder int64  `json:"out_of_order"` // records that first arrived after a later one of their branch
	Lost       int64  `json:"lost"`         // not at the fold as they were committed, though nothing took them back
	Holds      bool   `json:"holds"`
	Folder     string `json:"folder,omitempty"` // if the databases are kept

	findings []string // all that contradicts the promise, in words
}

// place names a record in both databases.
type place struct {
	node string
	key  record.BranchKey
	lsn  int64
}

func (p place) String() string {
	return fmt.Sprintf("record %d of %s (branch %s)", p.lsn, p.key.Run, p.key.Branch)
}

// committed is a record of the node.
type committed struct {
	place
	kind    record.Kind
	typ     string
	data    []byte
	live    bool // on the run's live lineage
	shipped bool // or behind the shipped mark
	sent    bool // or perhaps sent before the rewind
}

// held is a record of the fold.
type held struct {
	typ  string
	data []byte
	live bool // counted
}

// ledger is the node's side: all records in the order of their commit, and the runs.
type ledger struct {
	node    string
	records []committed
	runs    []head
}

// audit compares the two databases, which nobody has open any more.
func audit(ctx context.Context, o Options, db, foldDB string) (f *Figures, err error) {
	ctx, cancel := context.WithTimeout(ctx, o.patience)
	defer cancel()
	f = &Figures{}
	l, err := f.readNode(ctx, o.Schema, db)
	if err != nil {
		return nil, fmt.Errorf("read the node's database: %w", err)
	}
	events, err := fold.Open(ctx, foldDB, fold.Options{Store: sqlite.Options{ReadOnly: true}})
	if err != nil {
		return nil, fmt.Errorf("read the fold's database: %w", err)
	}
	defer func() { err = errors.Join(err, events.Close()) }()
	there, verified, err := f.readFold(ctx, events)
	if err != nil {
		return nil, fmt.Errorf("read the fold's database: %w", err)
	}
	f.compare(l, there)
	f.check(verified)
	if err := f.checkCount(ctx, events, l); err != nil {
		return nil, fmt.Errorf("read the fold's database: %w", err)
	}
	f.Holds = f.verdict() == nil
	return f, nil
}

func (f *Figures) found(format string, args ...any) {
	f.findings = append(f.findings, fmt.Sprintf(format, args...))
}

// recordsQuery reads the outbox. Live is what may be exported: of an abandoned branch the part before the fork. Sent is
// what had its PUBACK when the run's next branch was opened, and the one record that may have been on its way then (G7):
// the stage rewinds when nothing else is. Both times are the node's recorded time.
const recordsQuery = `WITH line AS MATERIALIZED (
	SELECT b.id, b.ulid, r.tenant, r.name, b.exportable, b.shipped, 1 + coalesce((SELECT max(s.upto) FROM ship_log s
		JOIN branch next ON next.run = b.run AND next.gen = b.gen + 1 WHERE s.branch = b.id AND s.at_us <= next.opened_us), b.fork_lsn) AS sent
	FROM branch b JOIN run r ON r.id = b.run)
	SELECT l.tenant, l.name, l.ulid, o.lsn, o.kind, o.type, o.data, o.lsn <= l.exportable, o.lsn <= l.shipped, o.lsn <= l.sent
	FROM outbox o JOIN line l ON l.id = o.branch ORDER BY o.id`

// readNode returns all that was committed, and holds the node's database against itself.
func (f *Figures) readNode(ctx context.Context, schema, db string) (_ *ledger, err error) {
	store, err := sqlite.Open(ctx, db, sqlite.NodeSchema(schema, "", db), sqlite.Options{ReadOnly: true})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	id, err := sqlite.ReadNode(ctx, store)
	if err != nil {
		return nil, err
	}
	stats, err := outbox.New(store, id.Name).Stats(ctx, "")
	if err != nil {
		return nil, err
	}
	l := &ledger{node: id.Name}
	if l.runs, err = heads(ctx, store); err != nil {
		return nil, err
	}
	rows, err := store.Reader().QueryContext(ctx, recordsQuery)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		c := committed{place: place{node: id.Name}}
		if err := rows.Scan(&c.key.Tenant, &c.key.Run, &c.key.Branch, &c.lsn, &c.kind, &c.typ, &c.data, &c.live, &c.shipped, &c.sent); err != nil {
			return nil, err
		}
		l.records = append(l.records, c)
	}
	f.Runs, f.Committed = int64(len(l.runs)), int64(len(l.records))
	if stats.Pending > 0 {
		f.found("%d records are still pending", stats.Pending)
	}
	if sum := stats.Pending + stats.Shipped + stats.Withheld + stats.Dead + stats.Expired; sum != f.Committed {
		f.found("the outbox has %d records and counts %d", f.Committed, sum)
	}
	return l, errors.Join(rows.Err(), f.checkNode(ctx, store))
}

// readFold returns all that arrived, each record once, and the fold's own verification.
func (f *Figures) readFold(ctx context.Context, events *fold.Fold) (_ map[place]held, v *fold.Verification, err error) {
	if v, err = events.Verify(ctx); err != nil {
		return nil, nil, err
	}
	// record.id is the order of arrival; shown = 0 is a second content under one key.
	rows, err := events.Reader().QueryContext(ctx, `WITH counted AS MATERIALIZED (SELECT branch, lo, hi FROM lineage)
		SELECT n.name, u.tenant, u.name, b.ulid, r.lsn, r.shown, r.type, r.data,
			EXISTS (SELECT 1 FROM counted c WHERE c.branch = r.branch AND r.lsn > c.lo AND r.lsn <= c.hi)
		FROM record r JOIN branch b ON b.id = r.branch JOIN run u ON u.id = b.run JOIN node n ON n.id = u.node ORDER BY r.id`)
	if err != nil {
		return nil, nil, err
	}
	defer rows.Close()
	f.Duplicates, f.Deliveries = v.Duplicates, v.Duplicates
	all, newest := map[place]held{}, map[record.BranchKey]int64{}
	for rows.Next() {
		var at place
		var h held
		var shown bool
		if err := rows.Scan(&at.node, &at.key.Tenant, &at.key.Run, &at.key.Branch, &at.lsn, &shown, &h.typ, &h.data, &h.live); err != nil {
			return nil, nil, err
		}
		f.Deliveries++
		if at.lsn < newest[at.key] {
			f.OutOfOrder++
			f.found("%s arrived after record %d", at, newest[at.key])
		}
		newest[at.key] = max(newest[at.key], at.lsn)
		if shown {
			all[at] = h
		}
	}
	return all, v, rows.Err()
}

// compare finds for each committed record what became of it.
func (f *Figures) compare(l *ledger, there map[place]held) {
	for _, c := range l.records {
		h, arrived := there[c.place]
		delete(there, c.place)
		switch {
		case c.kind != record.Event:
			f.found("%s is no event, and the fold counts nothing else", c)
		case arrived && (h.typ != c.typ || !bytes.Equal(h.data, c.data)):
			f.Lost++
			f.found("%s came as %s %.60q and was %s %.60q", c, h.typ, h.data, c.typ, c.data)
		case arrived && h.live != c.live:
			f.found("%s: on the live lineage for the node %t, for the fold %t", c, c.live, h.live)
		case arrived && c.live:
			f.Folded++
		case arrived && !c.sent:
			f.Escaped++
			f.found("%s was sent after the rewind that took it back", c)
		case arrived:
			f.Undone++
		case c.live || c.shipped:
			f.Lost++
			f.found("%s is lost", c)
		default:
			f.Withheld++
		}
	}
	for at := range there { // what is left
		f.found("the fold holds %s, which was never committed", at)
	}
}

// check adds up the figures and holds them against the fold's own.
func (f *Figures) check(v *fold.Verification) {
	for _, w := range v.Findings {
		f.found("the fold finds a %s in %s (branch %s)", w.What, w.Run, w.Branch)
	}
	for what, n := range map[string]int64{"parked": v.Parked, "set aside as malformed": v.Malformed, "given up as a hole": v.Holes} {
		if n > 0 {
			f.found("the fold has %d %s", n, what)
		}
	}
	off := f.Undone + f.Escaped
	if f.Committed != f.Folded+f.Withheld+off+f.Lost {
		f.found("%d committed are not %d folded, %d withheld, %d undone or escaped and %d lost", f.Committed, f.Folded, f.Withheld, off, f.Lost)
	}
	if f.Deliveries != f.Folded+off+f.Duplicates {
		f.found("%d deliveries are not %d folded, %d undone or escaped and %d duplicates", f.Deliveries, f.Folded, off, f.Duplicates)
	}
	if v.Records != f.Folded+off || v.Abandoned != off {
		f.found("the fold counts %d records, %d of them undone", v.Records, v.Abandoned)
	}
}

// verdict is nil if the promise holds and something was shown.
func (f *Figures) verdict() error {
	if n := len(f.findings); n > 0 {
		more := ""
		if n > 3 {
			more = fmt.Sprintf("; and %d more", n-3)
		}
		return fmt.Errorf("%w: %s%s", ErrBroken, strings.Join(f.findings[:min(n, 3)], "; "), more)
	}
	for what, n := range map[string]int64{"duplicate": f.Duplicates, "withheld record": f.Withheld, "undone record": f.Undone} {
		if n == 0 {
			return fmt.Errorf("%w: there was no %s", ErrProvedNothing, what)
		}
	}
	return nil
}

func (f *Figures) writeJSON(w io.Writer) error { return json.NewEncoder(w).Encode(f) }

// table shows the figures.
func (f *Figures) table(s *screen) {
	s.raw("")
	for _, r := range []struct {
		name string
		n    int64
		note string
	}{
		{"records committed", f.Committed, "by the node"},
		{"  folded exactly once", f.Folded, "the history of the runs"},
		{"  withheld", f.Withheld, "rewound, never shipped"},
		{"  undone", f.Undone, "rewound, sent by then"},
		{"deliveries", f.Deliveries, "to the fold"},
		{"  duplicates among them", f.Duplicates, "changed nothing"},
		{"out of order", f.OutOfOrder, ""},
		{"escaped", f.Escaped, "rewound, and yet sent"},
		{"lost", f.Lost, ""},
	} {
		s.raw(strings.TrimRight(fmt.Sprintf("   %-24s%7s  %s", r.name, comma(r.n), r.note), " "))
	}
	s.raw("")
}
