// Package demo is `postrider demo`: the promise, shown in ten seconds on the parts that serve and dev are made of. Runs
// work while the broker is down; then the backlog drains over a link that is slowed so that it can be watched, loses
// PUBACKs, breaks the relay, and sees a run rewound. At the end everything is stopped, and what happened is read from the
// node's and the fold's databases, record by record: nothing that the demo counted itself is in the result.
package demo

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"
)

var (
	// ErrBroken: the databases contradict the promise.
	ErrBroken = errors.New("the promise does not hold")
	// ErrProvedNothing: nothing contradicts the promise, but what it is about did not happen.
	ErrProvedNothing = errors.New("the demo proved nothing")
)

// Options of Run. Schema and Out are required.
type Options struct {
	Schema string       // schema.sql
	Out    io.Writer    // the story; redrawn in place if it is a terminal
	Self   string       // how this program is called, for the commands that are shown; "": postrider
	JSON   bool         // no story: only the figures, as one JSON object
	Plain  bool         // nothing is redrawn in place: something else writes to the same terminal
	Keep   bool         // both databases stay
	Log    *slog.Logger // of the parts; nil: none

	// How much, and how long it should take at least; 0: 8 runs, 3,000 inputs in 3 s, shipped in 5 s.
	Runs, Inputs int
	Feed, Drain  time.Duration

	env         func(string) string           // nil: os.Getenv
	patience    time.Duration                 // for anything that has to happen; 0: 30 s
	beforeAudit func(db, foldDB string) error // tests spoil the databases here
}

func (o Options) filled() Options {
	o.Self = cmp.Or(o.Self, "postrider")
	o.Runs, o.Inputs = cmp.Or(o.Runs, 8), cmp.Or(o.Inputs, 3000)
	o.Feed, o.Drain = cmp.Or(o.Feed, 3*time.Second), cmp.Or(o.Drain, 5*time.Second)
	o.patience = cmp.Or(o.patience, 30*time.Second)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.env == nil {
		o.env = os.Getenv
	}
	return o
}

// Run shows the demo and returns nil if the promise held. It leaves nothing behind unless told to, also when ctx ends it
// early; then the error is the cause of ctx.
func Run(ctx context.Context, o Options) (err error) {
	o = o.filled()
	dir, err := os.MkdirTemp("", "postrider-demo-")
	if err != nil {
		return fmt.Errorf("make a folder for the demo: %w", err)
	}
	defer func() {
		if !o.Keep {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}()
	s := newScreen(o.Out, o.env, o.Plain)
	if o.JSON {
		s = newScreen(io.Discard, o.env, true)
	}
	db, foldDB := filepath.Join(dir, "demo.db"), filepath.Join(dir, "demo.fold.db")
	s.hang(bold, "", "A node, a broker and a fold, for about ten seconds")
	if o.Keep {
		s.raw("Both databases are made in " + dir)
	}
	if err := play(ctx, o, s, db, foldDB); err != nil {
		s.settle()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return err
	}
	if o.beforeAudit != nil {
		if err := o.beforeAudit(db, foldDB); err != nil {
			return err
		}
	}
	s.heading("3", "What the two databases say, record by record")
	s.hang(plain, "   ", "All parts have ended; this is read from their files.")
	f, err := audit(ctx, o, db, foldDB)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		return err
	}
	if o.Keep {
		f.Folder = dir
	}
	if o.JSON {
		if err := f.writeJSON(o.Out); err != nil {
			return err
		}
	}
	f.table(s)
	err = f.verdict()
	switch {
	case errors.Is(err, ErrBroken):
		s.hang(red, "   ", "The promise does not hold.")
	case err != nil:
		s.hang(red, "   ", "The demo proved nothing.")
	default:
		s.hang(green, "   ", "The promise holds: nothing lost, nothing twice, nothing out of order.")
	}
	if o.Keep {
		keep(s, o.Self, db, foldDB)
	}
	if err == nil {
		next(s, o.Self)
	}
	return errors.Join(err, s.err)
}

// keep says how to look into the databases.
func keep(s *screen, self, db, foldDB string) {
	s.heading("", "Both databases are kept")
	for _, c := range []string{"runs show run-1 --db " + db, "outbox stats --db " + db, "fold show run-1 --db " + foldDB, "fold verify --db " + foldDB} {
		s.raw("   " + self + " " + c)
	}
}

// next says what to try.
func next(s *screen, self string) {
	s.heading("", "What to try next")
	for _, c := range [][2]string{
		{self + " dev", "a node of your own"},
		{self + " send counter run-1", "from another terminal"},
		{self + " fold show run-1", "what arrived"},
		{self + " rewind run-1 --to 0", "take it back"},
		{"make test", "what holds, tested"},
	} {
		s.raw(fmt.Sprintf("   %-29s  %s", c[0], c[1]))
	}
}
