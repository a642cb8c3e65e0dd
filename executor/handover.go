package executor

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/oklog/ulid/v2"

	"postrider/internal/record"
	"postrider/internal/sqlite"
	"postrider/outbox"
)

// Route says which node has an agent that this one does not host.
type Route struct {
	Node       string
	BestEffort bool // no outbox behind it: an input is sent, then retired, and may be sent twice
}

// maxHops bounds how often an input is handed over: nodes whose routes form a circle would pass it on for ever.
const maxHops = 8

// place is where an input belongs.
type place struct {
	node       string // the other node; "": here
	bestEffort bool
	limit      int // bytes of data that may go there
}

func (p place) here() bool { return p.node == "" }

// placeOf decides where an input belongs. It leaves for another node only if it was addressed to that node, or a route
// names it, the agent is not hosted here, and the agent's run has no step here. Everything else belongs here, and waits for its
// agent if that is away; also what comes behind inputs that still wait at its run: they leave together, by detach.
// ErrNotFound: the agent was never hosted here and has no route.
func placeOf(ctx context.Context, tx *sqlite.Tx, a arrival) (place, error) {
	to, err := routeOf(ctx, tx, a)
	if err != nil || to.here() || a.node == to.node {
		return to, err
	}
	var behind bool
	err = tx.Get(ctx, `SELECT EXISTS (SELECT 1 FROM run r JOIN inbox i ON i.run = r.id WHERE r.tenant = ? AND r.name = ? AND r.agent = ?
		AND i.consumed_branch IS NULL AND i.cancelled_branch IS NULL AND i.ended_us IS NULL)`, []any{a.tenant, a.run, a.agent}, &behind)
	if err != nil {
		return place{}, fmt.Errorf("look up run %s: %w", a.run, err)
	}
	if behind {
		return place{}, nil
	}
	return to, nil
}

// routeOf is placeOf without a look at what waits.
func routeOf(ctx context.Context, tx *sqlite.Tx, a arrival) (place, error) {
	var own, node string
	var limit int
	var known, hosted, bestEffort, began bool
	err := tx.Get(ctx, `SELECT m.node, m.max_record, g.name IS NOT NULL, COALESCE(g.hosted, 0), COALESCE(t.node, ''), COALESCE(t.best_effort, 0)
		FROM meta m LEFT JOIN agent g ON g.name = ?1 LEFT JOIN route t ON t.agent = ?1 WHERE m.id = 1`, []any{a.agent},
		&own, &limit, &known, &hosted, &node, &bestEffort)
	if err != nil {
		return place{}, fmt.Errorf("look up agent %s: %w", a.agent, err)
	}
	switch {
	case a.node != "" && a.node != own:
		return place{node: a.node, limit: limit}, nil
	case hosted:
		return place{}, nil
	case node == "" || node == own:
		if !known {
			return place{}, fmt.Errorf("%w: agent %s was never hosted here and has no route", ErrNotFound, a.agent)
		}
		return place{}, nil
	}
	err = tx.Get(ctx, `SELECT EXISTS (SELECT 1 FROM run r JOIN branch b ON b.run = r.id WHERE r.tenant = ? AND r.name = ? AND r.agent = ? AND b.head_step > 0)`,
		[]any{a.tenant, a.run, a.agent}, &began)
	if err != nil {
		return place{}, fmt.Errorf("look up run %s: %w", a.run, err)
	}
	if began {
		return place{}, nil
	}
	return place{node, bestEffort, limit}, nil
}

// command is the one form in which an input leaves this node, on every path.
func command(a arrival, node string, occurred int64) record.Record {
	return record.Record{Kind: record.Command, Type: a.typ, Data: a.data, Occurred: occurred, Correlation: a.root(), Causation: a.causation, Trace: a.trace,
		ToNode: node, ToAgent: a.agent, ToRun: a.run, InputID: a.id, Hops: a.hops + 1, Expires: a.expires}
}

// way is how a command leaves this node.
type way interface {
	// Send has a command go. Of a durable way it only rings a bell: what is stored goes.
	Send(ctx context.Context, r *record.Record) error
}

// durable is a way with an outbox behind it. What it stored goes when there is a broker, whatever comes between, and so
// an input may be retired before it is sent. Without Store, sending comes first.
type durable interface {
	way
	// Store puts the command into the outbox; created says which step of this node made it, if one did.
	Store(ctx context.Context, tx *sqlite.Tx, tenant string, r record.Record, created outbox.Creator) error
}

// outboxWay is the way of every plain route, and of inputs that are addressed to a node.
type outboxWay struct{ notify func() }

func (w outboxWay) Send(context.Context, *record.Record) error { w.notify(); return nil }

// Store appends to the branch of the reserved run ~node, of which each tenant has one.
func (outboxWay) Store(ctx context.Context, tx *sqlite.Tx, tenant string, r record.Record, created outbox.Creator) error {
	head, err := nodeHead(ctx, tx, tenant)
	if err != nil {
		return err
	}
	head, err = appendTo(ctx, tx, head, 0, []record.Record{r})
	if err != nil {
		return err
	}
	return outbox.SetCreator(ctx, tx, head.TailID, created)
}

// nodeHead is the head of the tenant's ~node branch, which is made with its first command. It is never rewound.
func nodeHead(ctx context.Context, tx *sqlite.Tx, tenant string) (outbox.Head, error) {
	var h outbox.Head
	err := tx.Get(ctx, `SELECT b.id, b.head_lsn, b.event_lsn, b.tail_id, b.head_bytes FROM run r JOIN branch b ON b.id = r.live WHERE r.tenant = ? AND r.name = ?`,
		[]any{tenant, record.NodeRun}, &h.Branch, &h.LSN, &h.EventLSN, &h.TailID, &h.Bytes)
	if !errors.Is(err, sql.ErrNoRows) {
		return h, err
	}
	_, run, err := tx.Exec(ctx, `INSERT INTO run (tenant, name, agent, live, gens, status, created_us, updated_us) VALUES (?, ?, ?, 0, 0, 'idle', ?, ?)`,
		tenant, record.NodeRun, record.NodeRun, tx.NowUS, tx.NowUS)
	if err != nil {
		return outbox.Head{}, fmt.Errorf("make run %s: %w", record.NodeRun, err)
	}
	return openBranch(ctx, tx, branchStart{run: run, tenant: tenant})
}

// passOn gives each due input without a run to where it belongs: to its run here, or, stored in the outbox and retired
// in one transaction, to another node. But for steps and best-effort routes (Forwarder) it is the only way out of the
// inbox: due timers, requeued and received inputs and those whose agent is gone (detach) all come here. more says that
// there may be others.
func (e *Executor) passOn(ctx context.Context) (more bool, err error) {
	rows, err := e.look.strays(ctx, e.store, "NOT "+bestEffortOnly, strayBatch)
	if err != nil || len(rows) == 0 {
		return false, err
	}
	w := outboxWay{e.o.Notify}
	err = handOver(ctx, e.store, w, rows)
	if sqlite.IsConstraint(err) { // one that the database refuses must not hold up the others
		err = nil
		for i := 0; i < len(rows) && err == nil; i++ {
			if err = handOver(ctx, e.store, w, rows[i:i+1]); sqlite.IsConstraint(err) {
				reason := "cannot be passed on: " + err.Error()
				err = e.store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) error { return bury(ctx, tx, rows[i], reason) })
			}
		}
	}
	if err != nil {
		e.look = look{} // they are still there
	}
	return err == nil && len(rows) == strayBatch, err
}

// handOver passes inputs on by a way: store, retire, send by a durable one, the first two in one transaction, and send,
// retire by any other. What belongs here, since its agent is back, is given to its run.
func handOver(ctx context.Context, store *sqlite.Store, w way, rows []int64) error {
	d, stored := w.(durable)
	if !stored {
		for _, row := range rows {
			if err := sendThenRetire(ctx, store, w, row); err != nil {
				return err
			}
		}
		return nil
	}
	var sent []record.Record
	err := store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) error {
		sent = sent[:0]
		for _, row := range rows {
			s, r, err := leaving(ctx, tx, row, false)
			if err != nil {
				return err
			}
			if r == nil {
				continue
			}
			if err := d.Store(ctx, tx, s.tenant, *r, outbox.Creator{Branch: s.createdBranch, Step: s.createdStep}); err != nil {
				return fmt.Errorf("store input %s for node %s: %w", s.id, r.ToNode, err)
			}
			if err := retire(ctx, tx, s, r.ToNode); err != nil {
				return err
			}
			sent = append(sent, *r)
		}
		return nil
	})
	if err != nil {
		return err
	}
	for i := range sent {
		if err := w.Send(ctx, &sent[i]); err != nil {
			return err
		}
	}
	return nil
}

func sendThenRetire(ctx context.Context, store *sqlite.Store, w way, row int64) error {
	var s *stray
	var r *record.Record
	err := store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) (err error) {
		s, r, err = leaving(ctx, tx, row, true)
		return err
	})
	if err != nil || r == nil {
		return err
	}
	if r.Expires != 0 {
		r.Expires = store.Wall(r.Expires)
	}
	if err := w.Send(ctx, r); err != nil { // other runs go first next time: perhaps it is this one that no broker takes
		werr := store.Write(context.WithoutCancel(ctx), func(ctx context.Context, tx *sqlite.Tx) error {
			_, _, err := tx.Exec(ctx, `UPDATE inbox SET attempts = attempts + 1, next_us = ? + ? * min(60, attempts + 1), last_error = ?
				WHERE id = ? AND run IS NULL AND ended_us IS NULL`, tx.SteadyUS, time.Second.Microseconds(), cut(err.Error(), 1024), row)
			return err
		})
		return errors.Join(err, werr)
	}
	return store.Write(context.WithoutCancel(ctx), func(ctx context.Context, tx *sqlite.Tx) error { // also when its session ends now
		if again, err := strayAt(ctx, tx, row); err != nil || again == nil {
			return err // cancelled, or its agent came back: it may be handled twice, as best effort says
		}
		return retire(ctx, tx, s, r.ToNode)
	})
}

// leaving decides what becomes of a stray: the command that it leaves as, or nil when it does not leave by this way,
// with all that comes of it done: it was given to its run, is a dead letter, or waits for somebody to know its agent.
func leaving(ctx context.Context, tx *sqlite.Tx, row int64, bestEffort bool) (*stray, *record.Record, error) {
	s, err := strayAt(ctx, tx, row)
	if err != nil || s == nil {
		return nil, nil, err
	}
	to, err := placeOf(ctx, tx, s.arrival)
	switch {
	case errors.Is(err, ErrNotFound):
		_, _, err = tx.Exec(ctx, "UPDATE inbox SET next_us = ?, last_error = ? WHERE id = ?", tx.SteadyUS+strayPause.Microseconds(),
			"agent "+s.agent+" is not hosted here, and has no route", row)
		return nil, nil, err
	case err != nil:
		return nil, nil, err
	case s.expires != 0 && s.expires <= tx.SteadyUS:
		return nil, nil, bury(ctx, tx, row, "expired before it was handed over")
	case to.here():
		return nil, nil, adopt(ctx, tx, s)
	case to.bestEffort != bestEffort:
		return nil, nil, nil // the other way's
	case s.hops >= maxHops:
		return nil, nil, bury(ctx, tx, row, fmt.Sprintf("was handed over %d times; the routes of the nodes go round in a circle", s.hops))
	case len(s.data) > to.limit:
		return nil, nil, bury(ctx, tx, row, tooLarge(s.arrival, to).Error())
	}
	r := command(s.arrival, to.node, tx.NowUS)
	r.Key.Tenant = s.tenant
	return s, &r, nil
}

// tooLarge says why an input cannot leave for another node.
func tooLarge(a arrival, to place) error {
	return fmt.Errorf("has %d bytes; at most %d (--max-record) go to another node", len(a.data), to.limit)
}

// adopt gives a stray to its run here.
func adopt(ctx context.Context, tx *sqlite.Tx, s *stray) error {
	run, err := openRun(ctx, tx, s.arrival)
	if errors.Is(err, ErrConflict) {
		return bury(ctx, tx, s.row, err.Error())
	}
	if err != nil {
		return err
	}
	if _, _, err := tx.Exec(ctx, "UPDATE inbox SET run = ?, next_us = NULL, last_error = NULL WHERE id = ?", run, s.row); err != nil {
		return fmt.Errorf("give input %s to run %s: %w", s.id, s.run, err)
	}
	return wake(ctx, tx, run, tx.SteadyUS)
}

// bury makes a dead letter of a pending input.
func bury(ctx context.Context, tx *sqlite.Tx, row int64, reason string) error {
	_, _, err := tx.Exec(ctx, "UPDATE inbox SET ended_us = ?, outcome = 'dead', reason = ? WHERE id = ?", tx.NowUS, reason, row)
	if err != nil {
		return fmt.Errorf("set input of row %d aside: %w", row, err)
	}
	return nil
}

// retire ends the inbox row of an input that left for another node. Row and id are the ones that it was stored under.
func retire(ctx context.Context, tx *sqlite.Tx, s *stray, node string) error {
	_, _, err := tx.Exec(ctx, "UPDATE inbox SET ended_us = ?, outcome = 'handed-over', reason = ?, next_us = NULL, last_error = NULL WHERE id = ?",
		tx.NowUS, toNode+node, s.row)
	if err != nil {
		return fmt.Errorf("retire input %s: %w", s.id, err)
	}
	return remember(ctx, tx, s.arrival, s.row, handedOver)
}

// detach takes what waits from a run that never had a step and whose agent is at another node now, so that it is passed
// on; false when the run stays.
func detach(ctx context.Context, tx *sqlite.Tx, run int64, a arrival) (bool, error) {
	to, err := routeOf(ctx, tx, a)
	if errors.Is(err, ErrNotFound) || err == nil && to.here() {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	_, _, err = tx.Exec(ctx, "UPDATE inbox SET run = NULL WHERE run = ? AND consumed_branch IS NULL AND cancelled_branch IS NULL AND ended_us IS NULL", run)
	if err == nil {
		_, _, err = tx.Exec(ctx, `UPDATE run SET status = 'idle', wake_us = NULL, claim_step = NULL, claim_input = NULL, attempts = 0, last_error = NULL, updated_us = ?
			WHERE id = ?`, tx.NowUS, run)
	}
	if err != nil {
		return false, fmt.Errorf("take the inputs of run %s: %w", a.run, err)
	}
	return true, nil
}

// Forwarder lends the due inputs of best-effort routes to whoever has a connection.
type Forwarder struct {
	store  *sqlite.Store
	node   string
	branch string // of these commands' keys: no record of the outbox has it
	epoch  int64
	lsn    int64
	look   look
}

// NewForwarder returns the forwarder of a node's store. It is for one caller at a time.
func NewForwarder(store *sqlite.Store, id sqlite.Node) *Forwarder {
	return &Forwarder{store: store, node: id.Name, epoch: id.Epoch, branch: ulid.Make().String()}
}

// Forward calls send for each due input of a best-effort route, and retires it once send returned nil; n says how many
// were. An error of send ends the round: they stay, and are sent again.
func (f *Forwarder) Forward(ctx context.Context, send func(ctx context.Context, r *record.Record) error) (n int, err error) {
	rows, err := f.look.strays(ctx, f.store, bestEffortOnly, strayBatch)
	if err != nil {
		return 0, err
	}
	defer func() {
		if err != nil {
			f.look = look{} // they are still there
		}
	}()
	w := lent{f, func(ctx context.Context, r *record.Record) error {
		err := send(ctx, r)
		if err == nil {
			n++
		}
		return err
	}}
	for len(rows) > 0 && err == nil {
		err = handOver(ctx, f.store, w, rows[:1])
		rows = rows[1:]
	}
	return n, err
}

// lent is the way of a best-effort route. It has no Store.
type lent struct {
	f    *Forwarder
	send func(ctx context.Context, r *record.Record) error
}

func (w lent) Send(ctx context.Context, r *record.Record) error {
	w.f.lsn++
	r.Node, r.Epoch, r.Gen, r.LSN, r.Recorded = w.f.node, w.f.epoch, 1, w.f.lsn, r.Occurred
	r.Key = record.BranchKey{Tenant: r.Key.Tenant, Run: record.NodeRun, Branch: w.f.branch}
	return w.send(ctx, r)
}
