package kind

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"postrider/internal/agent"
)

// maxFrame bounds one line in either direction, without its line feed.
const maxFrame = 32 << 20

// ExecOptions may be left zero.
type ExecOptions struct {
	Procs       int           // processes at most, each with one step at a time; 0: one per core
	StepTimeout time.Duration // how long a process may be silent in a step; 0: 60 s
	CloseGrace  time.Duration // at Close, from the end of stdin to TERM; 0: 5 s
	KillGrace   time.Duration // from TERM to KILL; 0: 2 s
	Logger      *slog.Logger  // gets stderr and log lines; nil: nobody does
}

// Exec is the kind exec: an agent as child processes, run by sh -c, spoken to in JSON lines on stdin and stdout.
//
// A process is started on first use and kept. It is in its own process group, and it is given up, the whole group with
// it, after anything that leaves in doubt what its next line would mean: silence, a cancelled step, a line that is no
// reply. Step returns only when that group is gone, so an attempt never overlaps the one before it.
type Exec struct {
	name, command string
	o             ExecOptions
	log           *slog.Logger
	stale         atomic.Int64
	slots         chan struct{} // one token for each step in hand, hence for each process in use
	closing       chan struct{}
	closed        sync.Once

	mu   sync.Mutex
	live map[*process]struct{} // every process not yet seen to be gone
	idle []*process            // the last one used is the next one used: the rest need not exist
}

var errClosed = errors.New("the agent is shut down")

// NewExec stores what it is given. Processes start when steps need them.
func NewExec(name, command string, o ExecOptions) *Exec {
	if o.Procs <= 0 {
		o.Procs = runtime.NumCPU()
	}
	if o.StepTimeout <= 0 {
		o.StepTimeout = 60 * time.Second
	}
	if o.CloseGrace <= 0 {
		o.CloseGrace = 5 * time.Second
	}
	if o.KillGrace <= 0 {
		o.KillGrace = 2 * time.Second
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return &Exec{
		name:    name,
		command: command,
		o:       o,
		log:     o.Logger.With("component", "exec", "agent", name),
		slots:   make(chan struct{}, o.Procs),
		closing: make(chan struct{}),
		live:    make(map[*process]struct{}),
	}
}

// Stale counts replies that were dropped because their step was not the one in hand.
func (e *Exec) Stale() int64 { return e.stale.Load() }

// Step implements agent.Agent. ctx carries the deadline; Step.Deadline is only passed on. The agent's own verdict is an
// *agent.Error; every other error names agent and step, and the offending line where there is one.
func (e *Exec) Step(ctx context.Context, s agent.Step) (agent.Effects, error) {
	eff, err := e.step(ctx, s)
	if _, verdict := errors.AsType[*agent.Error](err); err == nil || verdict {
		return eff, err
	}
	return agent.Effects{}, fmt.Errorf("agent %s, step %s: %w", e.name, s.ID(), err)
}

func (e *Exec) step(ctx context.Context, s agent.Step) (agent.Effects, error) {
	frame := appendFrame(nil, s)
	if len(frame)-1 > maxFrame {
		return agent.Effects{}, fmt.Errorf("the request has %d bytes, more than %d", len(frame)-1, maxFrame)
	}
	select {
	case e.slots <- struct{}{}:
		defer func() { <-e.slots }()
	case <-e.closing:
		return agent.Effects{}, errClosed
	case <-ctx.Done():
		return agent.Effects{}, fmt.Errorf("wait for a free process: %w", context.Cause(ctx))
	}
	for ctx.Err() == nil {
		p, err := e.take()
		if err != nil {
			return agent.Effects{}, err
		}
		a := p.decide(ctx, s.ID(), frame, e.o.StepTimeout)
		e.put(p, a.fault == nil)
		switch {
		case a.fault == nil:
			return a.effects, a.err
		case !errors.Is(a.fault, errUsedUp):
			return agent.Effects{}, a.fault
		}
	}
	return agent.Effects{}, context.Cause(ctx)
}

func (e *Exec) take() (*process, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	select {
	case <-e.closing:
		return nil, errClosed
	default:
	}
	if n := len(e.idle); n > 0 {
		p := e.idle[n-1]
		e.idle = e.idle[:n-1]
		return p, nil
	}
	// Under the lock, so that Close sees either no process or all of it.
	p, err := startProcess(e.command, e.o.KillGrace, e.log, &e.stale)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", cut([]byte(e.command)), err)
	}
	e.live[p] = struct{}{}
	return p, nil
}

func (e *Exec) put(p *process, keep bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if keep {
		e.idle = append(e.idle, p)
	} else {
		delete(e.live, p)
	}
}

// Close ends stdin of every process, then sends TERM, then KILL, with the graces of the options between; the end of ctx
// cuts the graces short. It returns when no process, goroutine or step is left. A step in hand may still answer in time.
func (e *Exec) Close(ctx context.Context) error {
	e.closed.Do(func() {
		e.mu.Lock()
		close(e.closing)
		var all sync.WaitGroup
		for p := range e.live {
			all.Go(func() { p.shutdown(ctx, e.o.CloseGrace) })
		}
		e.mu.Unlock()
		all.Wait()
		for range cap(e.slots) {
			e.slots <- struct{}{}
		}
	})
	return nil
}

// Slots is how many steps it takes at once.
func (e *Exec) Slots() int { return e.o.Procs }

// Kind is exec.
func (e *Exec) Kind() string { return "exec" }
