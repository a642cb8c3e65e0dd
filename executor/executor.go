// Package executor runs agents: it takes inputs into the inbox, decides which run has a step to do, asks the agent, and
// commits the step (new state, consumed input, records, follow-up inputs, the claim of the next step) in one
// transaction, or not at all. Steps of different runs go side by side, those of one run strictly in order. It never
// calls a broker or waits for one: what it wants exported is a row in the outbox, and Notify only rings a bell.
package executor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"postrider/internal/agent"
	"postrider/internal/record"
	"postrider/internal/sqlite"
	"postrider/outbox"
)

// Options of New; the zero value works.
type Options struct {
	Workers      int              // runs in hand at once; 0: 64
	Poll         time.Duration    // how often other processes' writes are looked for; 0: 200 ms
	MaxAttempts  int              // failed attempts of one step; 0: 5
	DeadLetter   bool             // after them, the input is set aside; default: the run is paused at it
	BackoffMin   time.Duration    // 0: 1 s
	BackoffMax   time.Duration    // 0: 5 min
	StepDeadline time.Duration    // hard limit of one attempt; 0: 15 min
	MaxContinue  int64            // steps in a row without input; 0: 10,000
	MaxRecord    int              // bytes of one record's data; 0: 256 KiB
	Alone        time.Duration    // after an unclean end: how long turns alone begin, and the longest of one; 0: 1 min
	Grace        time.Duration    // at the end, for steps in hand, before their context ends; 0: 2 s
	DedupWindow  time.Duration    // how long ids are remembered; 0: 7 days
	Routes       map[string]Route // by agent: where inputs go that this node has no agent for
	Topics       record.Topics    // where messages may not go: the node's own topics
	Notify       func()           // after a commit with records; must not block
	Logger       *slog.Logger
	Metrics      prometheus.Registerer // nil: none
}

// Executor runs the steps of one node.
type Executor struct {
	store  *sqlite.Store
	node   string
	agents map[string]agent.Agent
	o      Options
	log    *slog.Logger
	m      *metrics
	bell   chan struct{}
	errand chan struct{} // the bell of runErrands
	look   look          // of passOn, which is for one caller at a time
	ending atomic.Bool   // those in hand let go after their step
	turn   int           // which agent is looked at first
	boot   string        // of the machine
	clocks clocks        // of Run's loop
	turns  turns         // of what a former process had in hand

	looked atomic.Pointer[time.Time] // when runs were last looked for with success; nil: never

	pools    map[string]*pool // by hosted agent
	unhosted pool             // of the others
	mu       sync.Mutex
	active   map[int64]*worker // by run
}

// worker is a run in hand.
type worker struct {
	branch atomic.Int64 // that its steps belong to, always one; 0: no claim yet
	claim  atomic.Int64 // that the agent is asked under; 0: it is not asked now
	turn   bool         // it has one step, alone
	cancel context.CancelCauseFunc
	pool   *pool
}

// New returns an executor for node's store that hosts agents by name.
func New(store *sqlite.Store, node string, agents map[string]agent.Agent, o Options) *Executor {
	if o.Workers == 0 {
		o.Workers = 64
	}
	if o.Poll == 0 {
		o.Poll = 200 * time.Millisecond
	}
	if o.MaxAttempts == 0 {
		o.MaxAttempts = 5
	}
	if o.BackoffMin == 0 {
		o.BackoffMin = time.Second
	}
	if o.BackoffMax == 0 {
		o.BackoffMax = 5 * time.Minute
	}
	if o.StepDeadline == 0 {
		o.StepDeadline = 15 * time.Minute
	}
	if o.MaxContinue == 0 {
		o.MaxContinue = 10_000
	}
	if o.DedupWindow == 0 {
		o.DedupWindow = 7 * 24 * time.Hour
	}
	if o.MaxRecord == 0 {
		o.MaxRecord = 256 << 10
	}
	if o.Alone == 0 {
		o.Alone = time.Minute
	}
	if o.Grace == 0 {
		o.Grace = 2 * time.Second
	}
	if o.Notify == nil {
		o.Notify = func() {}
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	e := &Executor{store: store, node: node, agents: agents, o: o, log: o.Logger.With("component", "executor"), boot: store.Boot(),
		m: newMetrics(o.Metrics, agents), bell: make(chan struct{}, 1), errand: make(chan struct{}, 1), pools: map[string]*pool{}, unhosted: pool{slots: 1}, active: map[int64]*worker{}}
	for name, a := range agents {
		e.pools[name] = &pool{slots: slotsOf(a, o.Workers)}
	}
	return e
}

// Wake has the executor look now, instead of at its next poll, for ready runs and for inputs to pass on. It may be called
// from anywhere.
func (e *Executor) Wake() {
	ring(e.bell)
	ring(e.errand)
}

func ring(bell chan struct{}) {
	select {
	case bell <- struct{}{}:
	default:
	}
}

// stuckAfter is how long Run may go without a successful look for runs, which it takes several times a second.
const stuckAfter = 10 * time.Second

// Health fails when Run has not looked for runs for ten seconds: it did not start, the database cannot be read, or
// scheduling hangs. Agents that fail or hang are no matter of it.
func (e *Executor) Health() error {
	at := e.looked.Load()
	if at == nil {
		return errors.New("no run was looked for yet")
	}
	if ago := time.Since(*at); ago > stuckAfter {
		return fmt.Errorf("no run was looked for since %s", ago.Round(time.Second))
	}
	return nil
}

var errStopped = errors.New("the node stops")

// errRewound cancels a step in hand whose branch is no longer live, or whose input was taken away.
var errRewound = errors.New("the run was rewound, or its input withdrawn")

// Run executes steps until ctx ends, then lets those in hand finish for the grace period, gives the rest back, and
// returns nil. A fault of an agent never ends it; an error is the store's.
func (e *Executor) Run(ctx context.Context) error {
	if err := e.recover(ctx); err != nil {
		return fmt.Errorf("start executor: %w", err)
	}
	if err := e.watchClocks(ctx); err != nil {
		return fmt.Errorf("start executor: %w", err)
	}
	// Steps outlive ctx by the grace period.
	steps, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(errStopped)
	var wg sync.WaitGroup
	defer func() {
		e.ending.Store(true)
		t := time.AfterFunc(e.o.Grace, func() { cancel(errStopped) })
		defer t.Stop()
		e.disclaim(context.WithoutCancel(ctx))
		wg.Wait()
	}()
	box := outbox.New(e.store, e.node)
	watch, err := box.Watch(ctx)
	if err != nil {
		return fmt.Errorf("start executor: %w", err)
	}
	defer func() { watch.Close() }()
	timer := time.NewTimer(0)
	defer timer.Stop()
	wg.Go(func() { e.runErrands(ctx) })
	fence := false
	var said time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		case <-e.bell:
		}
		rewound, err := watch.Rewound(ctx)
		if err != nil && ctx.Err() == nil { // its connection may be broken
			if again, werr := box.Watch(ctx); werr == nil {
				watch.Close()
				watch, rewound = again, true // what it missed is looked for
			}
		}
		if fence = fence || rewound; fence {
			var ferr error
			fence, ferr = e.fence(ctx)
			err = errors.Join(err, ferr)
		}
		err = errors.Join(err, e.watchClocks(ctx))
		pause, serr := e.schedule(ctx, steps, &wg)
		if err = errors.Join(err, serr); err == nil {
			now := time.Now()
			e.looked.Store(&now)
		} else if ctx.Err() == nil && time.Since(said) > time.Minute {
			said = time.Now()
			e.log.Error("database cannot be read; runs wait", "err", err)
		}
		timer.Reset(pause)
	}
}

func (e *Executor) hosted(name string) bool { return e.agents[name] != nil }

// work decides and commits steps of one run until it rests, waits, ends or is fenced.
func (e *Executor) work(ctx context.Context, run int64, w *worker) {
	var c *claim
	err := e.store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) (err error) {
		c, err = claimStep(ctx, tx, run, e.hosted, e.hand())
		return err
	})
	for err == nil && c != nil {
		w.branch.Store(c.head.Branch)
		c, err = e.step(ctx, c, w)
	}
	switch {
	case err == nil, errors.Is(err, sqlite.ErrClosed), errors.Is(err, errStopped):
		return
	case errors.Is(err, errFenced):
		e.log.Info("late step changed nothing", "run_id", run)
	default:
		// The run stays as the database has it: in hand, and no worker. A pause keeps a broken disk from being hammered.
		e.log.Error("step could not be stored", "run_id", run, "err", err)
		if !sleep(ctx, 200*time.Millisecond) {
			return
		}
	}
	e.release(ctx, run)
}

// release returns a run to the queue whose claim has no worker any more, trying until the store takes it.
func (e *Executor) release(ctx context.Context, run int64) {
	for pause := 200 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		err := e.store.Write(context.WithoutCancel(ctx), func(ctx context.Context, tx *sqlite.Tx) error {
			_, _, err := tx.Exec(ctx, "UPDATE run SET status = 'ready', wake_us = ?, updated_us = ? WHERE id = ? AND status = 'running'", tx.SteadyUS, tx.NowUS, run)
			return err
		})
		if err == nil || errors.Is(err, sqlite.ErrClosed) || !sleep(ctx, pause) {
			return // at worst the next process finds it in hand
		}
	}
}

// sleep is false when ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// step asks the agent and commits its answer, or what its failure means. It returns the claim of the run's next step.
func (e *Executor) step(ctx context.Context, c *claim, w *worker) (*claim, error) {
	begin := time.Now()
	w.claim.Store(c.no)
	answer, aerr := e.ask(ctx, c, begin)
	w.claim.Store(0)
	var plan *effects
	if aerr == nil {
		l := limits{node: e.node, routes: e.o.Routes, topics: e.o.Topics, maxRecord: e.o.MaxRecord, hosted: e.hosted}
		if plan, aerr = l.plan(c, answer, e.store.NowUS(), e.store.SteadyUS()); aerr != nil {
			aerr = fmt.Errorf("agent %s, step %d of %s/%s: invalid effects: %w", c.agent, c.step, c.tenant, c.name, aerr)
		}
	}
	// The commit is not cancelled with the step: it is short, and its outcome counts.
	commit := context.WithoutCancel(ctx)
	var next *claim
	var err error
	outcome := "ok"
	switch {
	case aerr == nil:
		err = e.store.Write(commit, func(tctx context.Context, tx *sqlite.Tx) (err error) {
			c.hand = e.hand()
			next, err = commitStep(tctx, tx, c, plan, w.turn || w.pool.hungry.Load() || e.ending.Load() || ctx.Err() != nil, e.o.MaxContinue)
			return err
		})
		if err == nil && len(plan.records)+len(plan.local) > 0 { // a command may start a run, and that is a record
			e.o.Notify()
		}
		if err == nil && len(plan.local) > 0 {
			e.Wake()
		}
	case errors.Is(context.Cause(ctx), errStopped):
		outcome = "stopped"
		err = e.store.Write(commit, func(ctx context.Context, tx *sqlite.Tx) error { return giveBack(ctx, tx, c) })
	case errors.Is(context.Cause(ctx), errRewound):
		err = errFenced
	default:
		v := e.judge(c, aerr)
		outcome = v.status
		e.stepLog(c).Warn("step failed", "err", aerr, "then", v.status)
		err = e.store.Write(commit, func(ctx context.Context, tx *sqlite.Tx) error { return failStep(ctx, tx, c, v) })
		if err == nil && v.status == "paused" {
			e.o.Notify()
		}
	}
	if errors.Is(err, errFenced) {
		outcome = "fenced"
	} else if err != nil {
		outcome = "error"
	}
	e.m.steps.WithLabelValues(c.agent, outcome).Inc()
	e.m.duration.Observe(time.Since(begin).Seconds())
	return next, err
}

func (e *Executor) stepLog(c *claim) *slog.Logger {
	return e.log.With("tenant", c.tenant, "run", c.name, "agent", c.agent, "step", c.step, "attempt", c.attempt)
}

// ask calls the agent. A panic is a failed attempt.
func (e *Executor) ask(ctx context.Context, c *claim, now time.Time) (_ agent.Effects, err error) {
	deadline := now.Add(e.o.StepDeadline)
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("agent %s, step %d of %s/%s: panic: %v", c.agent, c.step, c.tenant, c.name, p)
			e.log.Error("agent panicked", "agent", c.agent, "run", c.name, "stack", string(debug.Stack()))
		}
	}()
	s := agent.Step{Tenant: c.tenant, Run: c.name, Branch: c.branch, Agent: c.agent, Number: c.step, Attempt: c.attempt,
		Now: now.UTC(), Deadline: deadline.UTC(), State: bytes.Clone(c.state), LastError: c.lastError}
	if c.input != nil {
		in := c.input.Input
		in.At = time.UnixMicro(c.input.atUS).UTC()
		s.Input = &in
	}
	answer, err := e.agents[c.agent].Step(ctx, s)
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx) // it answered after its time
	}
	return answer, err
}

// The bounds of a busy agent's pause.
const (
	busyMin = 10 * time.Millisecond
	busyMax = 24 * time.Hour
)

// judge turns an agent's error into what happens to its input.
func (e *Executor) judge(c *claim, aerr error) verdict {
	v := verdict{reason: cut(aerr.Error(), 4096), public: fmt.Sprintf("%d failed attempts", c.attempt), status: "waiting", countsAsOf: c.attempt}
	now := e.store.SteadyUS()
	var said *agent.Error
	if errors.As(aerr, &said) {
		v.public = cut(said.Error(), 1024)
	}
	switch {
	case said != nil && said.Code == agent.Busy:
		pause := said.RetryAfter
		if pause <= 0 {
			pause = e.o.BackoffMin
		}
		// Bounded at both ends: it never counts, so it might ask all the time, and for a time that never comes.
		pause = min(max(pause, min(busyMin, e.o.BackoffMin)), busyMax)
		v.wakeUS, v.countsAsOf = now+pause.Microseconds(), c.attempt-1
	case said != nil && said.Code == agent.Terminal:
		v.status = "dead"
	case c.attempt < int64(e.o.MaxAttempts):
		v.wakeUS = now + backoff(e.o.BackoffMin, e.o.BackoffMax, c.attempt).Microseconds()
	case e.o.DeadLetter:
		v.status = "dead"
	default:
		v.status = "paused"
	}
	if v.status == "dead" && c.input == nil {
		v.status = "paused" // there is no input to set aside
	}
	return v
}

// backoff doubles from least with the attempt (from 1) up to most, with full jitter: any pause up to that, but for the
// shortest, so that nothing is tried again at once.
func backoff(least, most time.Duration, attempt int64) time.Duration {
	least = max(least, 1)
	d := max(most, 1)
	if n := max(attempt, 1) - 1; least <= d>>n { // so least<<n does not overflow
		d = least << n
	}
	return max(rand.N(d)+1, min(least, d)/10)
}
