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

// Figures is what the two databases say. Each committed record is in exactly one of Folded, Withheld, Undone and Lost;
// each delivery is either the first of a record, so in Folded or Undone, or a duplicate.
type Figures struct {
	Runs       int64  `json:"runs"`
	Committed  int64  `json:"committed"`    // records in the node's outbox
	Folded     int64  `json:"folded"`       // held by the fold exactly once, as committed, and part of the run's live lineage
	Withheld   int64  `json:"withheld"`     // off the live lineage, never shipped, and not at the fold
	Undone     int64  `json:"undone"`       // off the live lineage, and at the fold, which does not count them
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
	kind    record.Kind
	typ     string
	data    []byte
	live    bool // on the run's live lineage
	shipped bool // or behind the shipped mark
}

// held is a record of the fold.
type held struct {
	typ  string
	data []byte
	live bool // counted
}

// audit compares the two databases, which nobody has open any more.
func audit(ctx context.Context, o Options, db, foldDB string) (*Figures, error) {
	ctx, cancel := context.WithTimeout(ctx, o.patience)
	defer cancel()
	f := &Figures{}
	node, order, err := f.readNode(ctx, o.Schema, db)
	if err != nil {
		return nil, fmt.Errorf("read the node's database: %w", err)
	}
	there, verified, err := f.readFold(ctx, foldDB)
	if err != nil {
		return nil, fmt.Errorf("read the fold's database: %w", err)
	}
	f.compare(node, order, there)
	f.check(verified)
	f.Holds = f.verdict() == nil
	return f, nil
}

func (f *Figures) found(format string, args ...any) {
	f.findings = append(f.findings, fmt.Sprintf(format, args...))
}

// readNode returns all that was committed, and its order.
func (f *Figures) readNode(ctx context.Context, schema, db string) (_ map[place]committed, order []place, err error) {
	store, err := sqlite.Open(ctx, db, sqlite.NodeSchema(schema, "", db), sqlite.Options{ReadOnly: true})
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	id, err := sqlite.ReadNode(ctx, store)
	if err != nil {
		return nil, nil, err
	}
	stats, err := outbox.New(store, id.Name).Stats(ctx, "")
	if err != nil {
		return nil, nil, err
	}
	if stats.Pending > 0 {
		f.found("%d records are still pending", stats.Pending)
	}
	// On the live lineage is what may be exported: of an abandoned branch that is the part before the fork.
	rows, err := store.Reader().QueryContext(ctx, `SELECT r.tenant, r.name, b.ulid, o.lsn, o.kind, o.type, o.data, o.lsn <= b.exportable, o.lsn <= b.shipped
		FROM outbox o JOIN branch b ON b.id = o.branch JOIN run r ON r.id = b.run ORDER BY o.id`)
	if err != nil {
		return nil, nil, err
	}
	defer rows.Close()
	all, runs := map[place]committed{}, map[string]bool{}
	for rows.Next() {
		at := place{node: id.Name}
		var c committed
		if err := rows.Scan(&at.key.Tenant, &at.key.Run, &at.key.Branch, &at.lsn, &c.kind, &c.typ, &c.data, &c.live, &c.shipped); err != nil {
			return nil, nil, err
		}
		all[at], runs[at.key.Run] = c, true
		order = append(order, at)
	}
	f.Runs, f.Committed = int64(len(runs)), int64(len(order))
	if sum := stats.Pending + stats.Shipped + stats.Withheld + stats.Dead + stats.Expired; sum != f.Committed {
		f.found("the outbox has %d records and counts %d", f.Committed, sum)
	}
	return all, order, rows.Err()
}

// readFold returns all that arrived, each record once, and the fold's own verification.
func (f *Figures) readFold(ctx context.Context, db string) (_ map[place]held, v *fold.Verification, err error) {
	events, err := fold.Open(ctx, db, fold.Options{Store: sqlite.Options{ReadOnly: true}})
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, events.Close()) }()
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
func (f *Figures) compare(node map[place]committed, order []place, there map[place]held) {
	for _, at := range order {
		c := node[at]
		h, arrived := there[at]
		delete(there, at)
		switch {
		case c.kind != record.Event:
			f.found("%s is no event, and the fold counts nothing else", at)
		case arrived && (h.typ != c.typ || !bytes.Equal(h.data, c.data)):
			f.Lost++
			f.found("%s came as %s %.60q and was %s %.60q", at, h.typ, h.data, c.typ, c.data)
		case arrived && h.live != c.live:
			f.found("%s: on the live lineage for the node %t, for the fold %t", at, c.live, h.live)
		case arrived && c.live:
			f.Folded++
		case arrived:
			f.Undone++
		case c.live || c.shipped:
			f.Lost++
			f.found("%s is lost", at)
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
	if f.Committed != f.Folded+f.Withheld+f.Undone+f.Lost {
		f.found("%d committed are not %d folded, %d withheld, %d undone and %d lost", f.Committed, f.Folded, f.Withheld, f.Undone, f.Lost)
	}
	if f.Deliveries != f.Folded+f.Undone+f.Duplicates {
		f.found("%d deliveries are not %d folded, %d undone and %d duplicates", f.Deliveries, f.Folded, f.Undone, f.Duplicates)
	}
	if v.Records != f.Folded+f.Undone || v.Abandoned != f.Undone {
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
		{"  undone", f.Undone, "rewound, shipped before"},
		{"deliveries", f.Deliveries, "to the fold"},
		{"  duplicates among them", f.Duplicates, "changed nothing"},
		{"out of order", f.OutOfOrder, ""},
		{"lost", f.Lost, ""},
	} {
		s.raw(strings.TrimRight(fmt.Sprintf("   %-24s%7s  %s", r.name, comma(r.n), r.note), " "))
	}
	s.raw("")
}
