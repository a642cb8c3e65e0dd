package demo

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"postrider/executor"
	"postrider/fold"
	"postrider/internal/agent"
	"postrider/internal/devbroker"
	"postrider/internal/kind"
	"postrider/internal/mqtt"
	"postrider/internal/record"
	"postrider/internal/sqlite"
	"postrider/outbox"
	"postrider/relay"
)

const (
	nodeName  = "demo"
	tenant    = "default" // what commands that look into a kept folder take without --tenant
	agentName = "counter"
	// endLimit bounds the end of each part.
	endLimit = 10 * time.Second
)

// parts are a node, a broker and a fold, joined as `postrider dev` joins them, but for the link.
type parts struct {
	broker *devbroker.Broker
	link   *link
	store  *sqlite.Store
	box    *outbox.Outbox
	exec   *executor.Executor
	fold   *fold.Fold
	sub    *fold.Subscriber

	fail func(error)    // ends the demo
	ends []func() error // what was opened and started; the last one ends first
}

// open makes the databases, starts the broker, makes the fold known to it and takes it down, and starts the rest. What
// ends by itself later calls fail.
func open(ctx context.Context, o Options, db, foldDB string, fail func(error)) (_ *parts, err error) {
	p := &parts{fail: fail}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	if p.broker, err = devbroker.Start("", o.Log); err != nil {
		return nil, err
	}
	p.ends = append(p.ends, func() error { p.broker.Close(); return nil })
	if p.store, err = sqlite.Open(ctx, db, sqlite.NodeSchema(o.Schema, nodeName, db), sqlite.Options{Create: true, Logger: o.Log}); err != nil {
		return nil, err
	}
	p.ends = append(p.ends, p.store.Close)
	id, err := sqlite.ReadNode(ctx, p.store)
	if err != nil {
		return nil, err
	}
	if p.fold, err = fold.Open(ctx, foldDB, fold.Options{Store: sqlite.Options{Create: true, Logger: o.Log}}); err != nil {
		return nil, err
	}
	p.ends = append(p.ends, p.fold.Close)
	p.sub, err = fold.NewSubscriber(p.fold, fold.SubscriberOptions{Broker: mqtt.Options{Broker: p.broker.URL()},
		MinBackoff: 50 * time.Millisecond, MaxBackoff: 200 * time.Millisecond})
	if err != nil {
		return nil, err
	}
	if err := p.sub.Announce(ctx); err != nil {
		return nil, err
	}
	p.broker.Down()

	counter, err := kind.New("go", agentName, "counter", kind.ExecOptions{Logger: o.Log})
	if err != nil {
		return nil, err
	}
	p.ends = append(p.ends, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), endLimit)
		defer cancel()
		return counter.Close(ctx)
	})
	p.box = outbox.New(p.store, nodeName)
	p.link = newLink(mqtt.Options{Broker: p.broker.URL(), ClientID: id.ClientID})
	// Short pauses: nobody wants to watch half a minute of backoff.
	r := relay.New(p.box, record.Topics{}, p.link.dial, relay.Options{
		BackoffMin: 100 * time.Millisecond, BackoffMax: 300 * time.Millisecond, Grace: 300 * time.Millisecond, Logger: o.Log})
	p.exec = executor.New(p.store, nodeName, map[string]agent.Agent{agentName: counter}, executor.Options{Notify: r.Notify, Logger: o.Log})
	p.start("fold", p.sub.Run)
	p.start("relay", r.Run)
	p.start("executor", p.exec.Run)
	return p, nil
}

// start runs one part in a goroutine of its own until close.
func (p *parts) start(what string, run func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		err := run(ctx)
		if ctx.Err() == nil {
			p.fail(errors.Join(fmt.Errorf("the %s ended by itself", what), err))
		}
		ended <- err
	}()
	p.ends = append(p.ends, func() error {
		cancel()
		limit := time.NewTimer(endLimit)
		defer limit.Stop()
		select {
		case err := <-ended:
			return err
		case <-limit.C:
			return fmt.Errorf("the %s did not end within %s", what, endLimit)
		}
	})
}

// close ends the executor, the relay, the fold, then closes what they used. Closing again is fine.
func (p *parts) close() error {
	var errs []error
	for _, end := range slices.Backward(p.ends) {
		errs = append(errs, end())
	}
	p.ends = nil
	return errors.Join(errs...)
}

// now is what the two databases count at a moment.
type now struct{ committed, pending, shipped, folded int64 }

func (p *parts) now(ctx context.Context) (now, error) {
	s, err := p.box.Stats(ctx, tenant)
	if err != nil {
		return now{}, err
	}
	v, err := p.fold.Verify(ctx)
	if err != nil {
		return now{}, err
	}
	return now{committed: s.Pending + s.Shipped + s.Withheld, pending: s.Pending, shipped: s.Shipped, folded: v.Records}, nil
}

// runs lists the runs; resting says whether none of them has anything left to do.
func (p *parts) runs(ctx context.Context) (list []executor.RunInfo, resting bool, err error) {
	if list, err = executor.Runs(ctx, p.store, tenant, "", "", 1000); err != nil {
		return nil, false, err
	}
	resting = true
	for _, r := range list {
		if r.Status == "paused" || r.Status == "failed" || r.Dead > 0 {
			return nil, false, fmt.Errorf("run %s is %s: %s", r.Run, r.Status, r.LastError)
		}
		resting = resting && r.Status == "idle" && r.Pending == 0
	}
	return list, resting, nil
}

// arrived says whether the fold holds everything that was shipped.
func (p *parts) arrived(ctx context.Context, runs []executor.RunInfo) (bool, error) {
	for _, r := range runs {
		d, err := executor.Show(ctx, p.store, tenant, r.Run)
		if err != nil {
			return false, err
		}
		for _, b := range d.Branches {
			held, err := p.fold.Held(ctx, nodeName, record.BranchKey{Tenant: tenant, Run: r.Run, Branch: b.Branch})
			if err != nil || b.Shipped > b.ForkLSN && held < b.Shipped {
				return false, err
			}
		}
	}
	return true, nil
}
