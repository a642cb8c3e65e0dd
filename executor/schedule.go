package executor

import (
	"context"
	"fmt"
	"maps"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"postrider/internal/agent"
)

// pool is the room that one agent has for runs in hand. Agents do not share all of it: one that hangs must leave room for
// the others, and a run whose agent has no free process must not hold a worker while it waits for one.
type pool struct {
	slots  int         // runs in hand at once
	active int         // under Executor.mu
	hungry atomic.Bool // more of its runs are ready than it has room for: those in hand let go after their step
}

// slotsOf is how many steps an agent takes at once; an agent may say so by a method.
func slotsOf(a agent.Agent, workers int) int {
	if s, ok := a.(interface{ Slots() int }); ok {
		return max(1, min(s.Slots(), workers))
	}
	return workers
}

// kindOf is how an agent is hosted; an agent may say so by a method.
func kindOf(a agent.Agent) string {
	if k, ok := a.(interface{ Kind() string }); ok {
		return k.Kind()
	}
	return "go"
}

const (
	agentsQuery = "SELECT name FROM agent ORDER BY name"
	readyQuery  = "SELECT id, wake_us FROM run WHERE agent = ? AND status IN ('ready', 'waiting') ORDER BY wake_us, id LIMIT ?"
)

// schedule starts a worker for each ready run while there is room, agents in turn, and says when to look again.
func (e *Executor) schedule(ctx, steps context.Context, wg *sync.WaitGroup) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if e.turns.on {
		if pause, err := e.takeTurn(ctx, steps, wg); err != nil || e.turns.on {
			return pause, err
		}
	}
	names, err := e.known(ctx)
	if err != nil {
		return e.o.Poll, err
	}
	pause := e.o.Poll
	e.turn++
	for i := range names {
		name := names[(e.turn+i)%len(names)]
		p := e.pools[name]
		if p == nil {
			p = &e.unhosted // its worker only says so in the run's status
		}
		next, err := e.scheduleAgent(ctx, steps, name, p, wg)
		if err != nil {
			return e.o.Poll, err
		}
		pause = min(pause, next)
	}
	return pause, nil
}

// known lists the agents that were ever hosted here: no run has another.
func (e *Executor) known(ctx context.Context) (names []string, err error) {
	rows, err := e.store.Query(ctx, agentsQuery)
	if err != nil {
		return nil, fmt.Errorf("list agents: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			return nil, fmt.Errorf("list agents: %w", err)
		}
		names = append(names, name)
	}
	return names, rows.Err()
}

func (e *Executor) scheduleAgent(ctx, steps context.Context, name string, p *pool, wg *sync.WaitGroup) (time.Duration, error) {
	rows, err := e.store.Query(ctx, readyQuery, name, 2*p.slots+1)
	if err != nil {
		return 0, fmt.Errorf("list ready runs of agent %s: %w", name, err)
	}
	defer rows.Close()
	pause, now := e.o.Poll, e.store.SteadyUS()
	hungry := false
	for rows.Next() {
		var id, wakeUS int64
		if err := rows.Scan(&id, &wakeUS); err != nil {
			return 0, fmt.Errorf("list ready runs of agent %s: %w", name, err)
		}
		if wakeUS > now {
			pause = min(pause, time.Duration(wakeUS-now)*time.Microsecond)
			break
		}
		if hungry = !e.start(steps, id, p, wg); hungry {
			break
		}
	}
	p.hungry.Store(hungry)
	return pause, rows.Err()
}

// start gives a run to a new worker; false when there is no room. A run in hand is left there.
func (e *Executor) start(steps context.Context, run int64, p *pool, wg *sync.WaitGroup) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.active[run] != nil {
		return true
	}
	if !e.room(p) {
		return false
	}
	ctx, cancel := context.WithCancelCause(steps)
	w := &worker{cancel: cancel, pool: p, turn: e.turns.on}
	e.active[run] = w
	p.active++
	wg.Go(func() {
		ended := false
		defer func() { // also when an agent ends the goroutine
			if p := recover(); p != nil {
				e.log.Error("step panicked", "run_id", run, "err", p, "stack", string(debug.Stack()))
			}
			if !ended {
				e.release(ctx, run)
			}
			cancel(nil)
			e.mu.Lock()
			delete(e.active, run)
			p.active--
			e.mu.Unlock()
			ring(e.bell) // there is room again
		}()
		e.work(ctx, run, w)
		ended = true
	})
	return true
}

// room says whether one more run fits into a pool. A place is kept for every agent that has none in hand.
func (e *Executor) room(p *pool) bool {
	if p.active >= p.slots {
		return false
	}
	kept := 0
	for _, other := range e.pools {
		if other != p && other.active == 0 {
			kept++
		}
	}
	if e.o.Workers <= len(e.pools) {
		kept = 0 // too few for that
	}
	return len(e.active)+kept < e.o.Workers
}

// fence cancels the steps in hand whose branch a rewind has abandoned, or whose input was taken away, by any process.
// Their commits would change nothing anyway; their agents need not go on. again asks for another look: a claim was on
// its way.
func (e *Executor) fence(ctx context.Context) (again bool, err error) {
	e.mu.Lock()
	inHand := maps.Clone(e.active)
	e.mu.Unlock()
	for run, w := range inHand {
		branch := w.branch.Load()
		if branch == 0 {
			again = true
			continue
		}
		asked := w.claim.Load()
		var live, claim int64
		if err := e.store.Get(ctx, "SELECT live, claim FROM run WHERE id = ?", []any{run}, &live, &claim); err != nil {
			return true, fmt.Errorf("look for rewinds: %w", err)
		}
		if live != branch || asked != 0 && claim != asked && w.claim.Load() == asked { // still asked: its own commit did not move it
			w.cancel(errRewound)
		}
	}
	return again, nil
}
