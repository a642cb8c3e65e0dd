package demo

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"postrider/executor"
)

const (
	look  = 100 * time.Millisecond // at the databases
	least = 25                     // inputs of a run, however slow the disk is
)

// stage is a demo that runs.
type stage struct {
	*parts
	o        Options
	screen   *screen
	feeds    sync.WaitGroup
	draining bool // the figures get a progress bar
}

// play runs the whole story and ends all parts.
func play(parent context.Context, o Options, s *screen, db, foldDB string) (err error) {
	ctx, fail := context.WithCancelCause(parent)
	defer fail(nil)
	p, err := open(ctx, o, db, foldDB, fail)
	if err != nil {
		return err
	}
	st := &stage{parts: p, o: o, screen: s}
	defer func() {
		fail(nil)
		st.feeds.Wait()
		if cerr := p.close(); err == nil {
			err = cerr // else mostly the same once more
		}
	}()
	if err := st.outage(ctx); err != nil {
		return err
	}
	return st.drain(ctx)
}

// outage: the runs work off their inputs without a broker.
func (st *stage) outage(ctx context.Context) error {
	st.screen.heading("1", fmt.Sprintf("The broker is down, and %d runs work all the same", st.o.Runs))
	st.header()
	if err := st.until(ctx, "the executor starts", func(now) (bool, error) { return st.exec.Health() == nil, nil }); err != nil {
		return err
	}
	fed := st.feed(ctx, max(1, st.o.Inputs/st.o.Runs), st.o.Feed)
	var steps int64
	err := st.until(ctx, "all inputs are worked off", func(now) (bool, error) {
		if ok, err := ended(fed); !ok || err != nil {
			return false, err
		}
		runs, resting, err := st.runs(ctx)
		steps = 0
		for _, r := range runs {
			steps += r.Step
		}
		return resting, err
	})
	if err != nil {
		return err
	}
	st.screen.settle()
	st.screen.point(fmt.Sprintf("All %d runs have worked off their inputs: %s steps, each one durable on disk.", st.o.Runs, comma(steps)))
	return nil
}

// drain: the broker comes back, and everything goes wrong.
func (st *stage) drain(ctx context.Context) error {
	before, err := st.now(ctx)
	if err != nil {
		return err
	}
	total := int(before.pending)
	st.screen.heading("2", "The broker is back, and all goes wrong on the way")
	st.screen.hang(plain, "   ", "The link is slowed down, so that you can watch.")
	st.header()
	st.draining = true
	if err := st.broker.Up(); err != nil {
		return err
	}
	// What is published while the fold is just coming back could overtake what waits for it in the broker.
	err = st.until(ctx, "the fold is back", func(now) (bool, error) {
		trouble, err := st.sub.Health()
		return trouble == "" && err == nil, nil
	})
	if err != nil {
		return err
	}
	losses := min(max(3, total/20), 150)
	st.link.open(plan{pause: st.o.Drain / time.Duration(max(1, total)), lose: total / 5, losses: losses, panicAt: losses + total*2/5, permitAt: losses + total*13/20})

	if err := st.until(ctx, "PUBACKs are lost", func(now) (bool, error) { return closed(st.link.lost), nil }); err != nil {
		return err
	}
	st.screen.point(fmt.Sprintf("%d PUBACKs are lost, then the connection. The broker has these records; the relay cannot know, and sends them again.", losses))
	if err := st.until(ctx, "the relay panics", func(now) (bool, error) { return closed(st.link.panicked), nil }); err != nil {
		return err
	}
	st.screen.point("The relay panics. Its supervisor starts it anew; the node notices nothing.")
	if err := st.rewind(ctx); err != nil {
		return err
	}
	fed := st.feed(ctx, max(2, st.o.Inputs/st.o.Runs/50), 0)
	close(st.link.permit)
	var runs []executor.RunInfo
	err = st.until(ctx, "everything is shipped", func(n now) (bool, error) {
		if ok, err := ended(fed); !ok || err != nil {
			return false, err
		}
		var resting bool
		runs, resting, err = st.runs(ctx)
		return resting && n.pending == 0, err
	})
	if err != nil {
		return err
	}
	err = st.until(ctx, "everything arrives", func(now) (bool, error) { return st.arrived(ctx, runs) })
	st.screen.settle()
	if errors.Is(err, errVain) {
		st.screen.point(fmt.Sprintf("Something is still missing after %s.", st.o.patience))
		return nil // what is missing will be named
	}
	return err
}

// rewind takes a run back to before what it has shipped, while more of it waits. The link stands still meanwhile, so that
// both are sure to be there.
func (st *stage) rewind(ctx context.Context) error {
	var out executor.Rewound
	err := st.until(ctx, "a run can be rewound", func(now) (bool, error) {
		name, to, settled, err := st.halfway(ctx)
		switch {
		case err != nil || !settled:
			return false, err
		case name == "": // each run has shipped all or nothing
			select {
			case st.link.permit <- struct{}{}:
			default:
			}
			return false, nil
		}
		out, err = executor.Rewind(ctx, st.store, tenant, name, to, "demo")
		return err == nil, err
	})
	if err != nil {
		return err
	}
	st.exec.Wake()
	st.screen.point(fmt.Sprintf("%s is rewound to step %d. Of the steps undone, %d records had been shipped. The other %d must not follow, "+
		"but for one that may be on its way. All runs get new inputs.", out.Run, out.ForkStep, out.Shipped, out.Withheld))
	return nil
}

// halfway finds the run that has the most both shipped and pending, and a step in the middle of what is shipped; "": no
// run has enough. One whose next record is already on the link comes last: that record still passes. settled: a record
// stands at the gate, and everything that was sent before it is acknowledged in the outbox. The audit counts on that: what
// has no PUBACK at the rewind is not sent, but for that record.
func (st *stage) halfway(ctx context.Context) (name string, to int64, settled bool, err error) {
	next, handed, ever := st.link.gate()
	if next == "" {
		return "", 0, false, nil
	}
	runs, _, err := st.runs(ctx)
	if err != nil {
		return "", 0, false, err
	}
	var most int64
	for _, r := range runs {
		d, err := executor.Show(ctx, st.store, tenant, r.Run)
		if err != nil {
			return "", 0, false, err
		}
		b := d.Branches[len(d.Branches)-1]
		if b.Shipped < handed[b.Branch] {
			return "", 0, false, nil
		}
		both := min(b.Shipped, b.LSN-b.Shipped)
		if both < 4 || b.Shipped < ever[b.Branch] { // an earlier connection had more of it
			continue
		}
		if b.Branch == next {
			both = 1
		}
		if both > most {
			most, name, to = both, r.Run, b.Shipped/2-1 // a step of the counter is one record, after the run's first one
		}
	}
	return name, to, true, nil
}

// feed gives n inputs to each run, evenly over the time given; a disk that is too slow for that gets fewer. The channel
// has the outcome once.
func (st *stage) feed(ctx context.Context, n int, over time.Duration) <-chan error {
	begin := time.Now()
	one := func(run int) error {
		for i := range n {
			at := time.Duration(i) * over / time.Duration(n)
			if late := time.Since(begin); late < at {
				t := time.NewTimer(at - late)
				select {
				case <-t.C:
				case <-ctx.Done():
					t.Stop()
					return context.Cause(ctx)
				}
			} else if late > over && i >= least {
				return nil
			}
			in := executor.Input{Tenant: tenant, Agent: agentName, Run: fmt.Sprintf("run-%d", run+1), Type: "message", Source: "cli", Data: fmt.Appendf(nil, `{"input":%d}`, i+1)}
			if _, err := executor.Submit(ctx, st.store, in); err != nil {
				return err
			}
			st.exec.Wake()
		}
		return nil
	}
	outcome := make(chan error, 1)
	st.feeds.Go(func() {
		errs := make([]error, st.o.Runs)
		var all sync.WaitGroup
		for run := range errs {
			all.Go(func() { errs[run] = one(run) })
		}
		all.Wait()
		outcome <- cmp.Or(errs...) // one disk fails for all runs alike
		close(outcome)
	})
	return outcome
}

// ended reads feed's outcome, as often as asked.
func ended(fed <-chan error) (bool, error) {
	select {
	case err := <-fed:
		return true, err
	default:
		return false, nil
	}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

var errVain = errors.New("in vain")

// until shows the figures, again and again, until ready says that what is waited for has happened.
func (st *stage) until(parent context.Context, what string, ready func(now) (bool, error)) error {
	ctx, cancel := context.WithTimeoutCause(parent, st.o.patience, fmt.Errorf("waited %s %w until %s", st.o.patience, errVain, what))
	defer cancel()
	again := time.NewTicker(look)
	defer again.Stop()
	for {
		n, err := st.now(ctx)
		ok := false
		if err == nil {
			st.show(n)
			if ok, err = ready(n); err == nil {
				err = st.screen.err // nobody watches any more
			}
		}
		if err == nil && ok { // what ready saw may be newer
			if n, err = st.now(ctx); err == nil {
				st.show(n)
			}
		}
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil || ok:
			return err
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// header names the columns that show fills.
func (st *stage) header() {
	l := layoutOf(st.screen.width())
	st.screen.raw(l.row("", "committed", "pending", "shipped", "folded"))
}

// show updates the line of figures.
func (st *stage) show(n now) {
	l := layoutOf(st.screen.width())
	label := "   broker down"
	if st.draining {
		label = l.bar(n.committed-n.pending, n.committed)
	}
	st.screen.status(l.row(label, comma(n.committed), comma(n.pending), comma(n.shipped), comma(n.folded)))
}
