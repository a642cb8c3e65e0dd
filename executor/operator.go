package executor

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"postrider/internal/record"
	"postrider/internal/sqlite"
	"postrider/outbox"
)

// Selection names inputs: Rows, or all dead letters of a Run, or All of the tenant's.
type Selection struct {
	Tenant string  // "": any
	Rows   []int64 // inbox.id
	Run    string
	All    bool
}

// Handled is an input that an operator did something with.
type Handled struct {
	Row             int64
	Tenant, Run, ID string
	Refused         *Refusal // of Run and All: why it was left as it is; nil: it was not
	NoExpiry        bool     // Requeue: it was too late for it, which no longer counts
}

// Refusal is an ErrConflict: what was asked for cannot be done with an input.
type Refusal struct {
	Row   int64
	Text  string
	Helps string // what there is to do instead: resume or reopen its run, or drop it; "": nothing
}

func (r *Refusal) Error() string { return ErrConflict.Error() + ": " + r.Text }
func (r *Refusal) Unwrap() error { return ErrConflict }

// operatorBatch bounds one transaction of a selection that may be of any size: steps wait for it.
const operatorBatch = 200

// Requeue gives dead letters to their runs again: under the same id, at the same place in the order, with attempts from 0.
// One that expired does not expire again, and one that was handed over too often may be once more: an operator wants it. Rows are requeued all or none; of Run and All, some at a
// time, and those that cannot be are left. Errors: ErrInvalid, ErrNotFound, ErrConflict (it is not dead or not well-formed,
// its run is over or another agent's, or its id belongs to another input by now).
func Requeue(ctx context.Context, store *sqlite.Store, which Selection, reason string) ([]Handled, error) {
	return operate(ctx, store, which, reason, requeue)
}

// Drop gives up inputs that are dead or not over yet: they stay as dropped, with the reason, and their ids stay seen. The
// step in hand with one is fenced, and a run that is paused at one goes on. Of Run and All, dead letters are meant. Errors:
// ErrInvalid, ErrNotFound, ErrConflict (it is over otherwise).
func Drop(ctx context.Context, store *sqlite.Store, which Selection, reason string) ([]Handled, error) {
	return operate(ctx, store, which, reason, drop)
}

// operation handles one input. With a Refusal it has changed nothing.
type operation func(ctx context.Context, tx *sqlite.Tx, tenant string, row int64, reason string) (Handled, error)

func operate(ctx context.Context, store *sqlite.Store, which Selection, reason string, do operation) (all []Handled, err error) {
	if err := checkReason(reason); err != nil {
		return nil, err
	}
	if len(which.Rows) > 0 {
		err := store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) error {
			all = all[:0]
			for _, row := range which.Rows {
				h, err := do(ctx, tx, which.Tenant, row, reason)
				if err != nil {
					return err
				}
				all = append(all, h)
			}
			return nil
		})
		return all, err
	}
	if which.Run == "" && !which.All {
		return nil, fmt.Errorf("%w inputs: none are named", ErrInvalid)
	}
	var after Handled
	for more := true; more; {
		var some []Handled
		err := store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) error {
			rows, err := deadRows(ctx, tx, which, after)
			if err != nil {
				return err
			}
			some = make([]Handled, 0, len(rows))
			for _, row := range rows {
				h, err := do(ctx, tx, which.Tenant, row, reason)
				if refusal, ok := errors.AsType[*Refusal](err); ok {
					h.Refused, err = refusal, nil
				}
				if err != nil {
					return err
				}
				some = append(some, h)
			}
			return nil
		})
		if err != nil {
			return all, err
		}
		if all, more = append(all, some...), len(some) == operatorBatch; more {
			after = some[len(some)-1]
		}
	}
	return all, nil
}

// deadQuery selects dead letters: ?1 tenant, ?2 run, those behind row ?3 of tenant ?4, at most ?5. Each batch is found
// where the one before ended, without a look at the rest: by tenant and then arrival in all tenants, else by arrival.
func (s Selection) deadQuery() string {
	switch {
	case s.Run == "" && s.Tenant == "":
		return "SELECT id FROM inbox INDEXED BY inbox_dead WHERE outcome = 'dead' AND (tenant, id) > (?4, ?3) ORDER BY tenant, id LIMIT ?5"
	case s.Run == "":
		return "SELECT id FROM inbox INDEXED BY inbox_dead WHERE outcome = 'dead' AND tenant = ?1 AND id > ?3 ORDER BY id LIMIT ?5"
	}
	tenant := ""
	if s.Tenant != "" {
		tenant = "tenant = ?1 AND "
	}
	const dead = "SELECT id FROM inbox INDEXED BY inbox_ended WHERE outcome = 'dead' AND id > ?3 AND "
	return dead + "run IN (SELECT id FROM run WHERE " + tenant + "name = ?2) UNION ALL " + dead + "run IS NULL AND " + tenant + "run_name = ?2 ORDER BY id LIMIT ?5"
}

// deadRows is the next batch of a selection.
func deadRows(ctx context.Context, tx *sqlite.Tx, which Selection, after Handled) (list []int64, err error) {
	rows, err := tx.Query(ctx, which.deadQuery(), which.Tenant, which.Run, after.Row, after.Tenant, operatorBatch)
	if err != nil {
		return nil, fmt.Errorf("look for dead letters: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var row int64
		if err := rows.Scan(&row); err != nil {
			return nil, fmt.Errorf("look for dead letters: %w", err)
		}
		list = append(list, row)
	}
	return list, rows.Err()
}

func checkReason(reason string) error {
	if err := record.CheckText(reason); err != nil || len(reason) > 1024 {
		return fmt.Errorf("%w reason: at most 1024 bytes of text without control characters", ErrInvalid)
	}
	return nil
}

// kept is an input as it is stored, and how its run stands.
type kept struct {
	arrival
	row, runID          int64 // runID 0: none
	state               string
	reason              string // of that state
	dueUS               int64
	runAgent, runStatus string
}

func readKept(ctx context.Context, tx *sqlite.Tx, tenant string, row int64) (k kept, err error) {
	k.row, k.explicit = row, true
	err = tx.Get(ctx, `SELECT i.tenant, i.run_name, i.agent, COALESCE(i.node, ''), i.input_id, i.type, i.source, i.hops, COALESCE(i.expires_us, 0), i.due_us, i.data,
		COALESCE(i.run, 0), COALESCE(r.agent, ''), COALESCE(r.status, ''), COALESCE(i.reason, ''), `+inputState+`
		FROM inbox i `+inputJoins+` WHERE i.id = ?2 AND (?3 = '' OR i.tenant = ?3)`, []any{tx.SteadyUS, row, tenant},
		&k.tenant, &k.run, &k.agent, &k.node, &k.id, &k.typ, &k.source, &k.hops, &k.expires, &k.dueUS, &k.data,
		&k.runID, &k.runAgent, &k.runStatus, &k.reason, &k.state)
	if errors.Is(err, sql.ErrNoRows) {
		return kept{}, fmt.Errorf("%w: there is no input %d", ErrNotFound, row)
	}
	if err != nil {
		return kept{}, fmt.Errorf("read input %d: %w", row, err)
	}
	return k, nil
}

func (k *kept) handled() Handled { return Handled{Row: k.row, Tenant: k.tenant, Run: k.run, ID: k.id} }

// wellFormed says why an input cannot be given to any agent. What came as none has no id: what it said of itself stands
// for nothing.
func (k *kept) wellFormed() error {
	in := Input{Tenant: k.tenant, Agent: k.agent, Run: k.run, Type: k.typ, Data: k.data}
	if err := in.check(); err != nil {
		return err
	}
	if k.hops > maxHops {
		return &FieldError{"hops", fmt.Errorf("%d are too many", k.hops)}
	}
	if err := checkID(k.id); err != nil {
		return &FieldError{"id", err}
	}
	if strings.HasPrefix(k.id, idPrefix) && !strings.HasPrefix(k.source, "/") && k.source != "timer" {
		return &FieldError{"id", errors.New("is kept for agents' commands")}
	}
	return nil
}

func requeue(ctx context.Context, tx *sqlite.Tx, tenant string, row int64, reason string) (Handled, error) {
	k, err := readKept(ctx, tx, tenant, row)
	if err != nil {
		return Handled{Row: row}, err
	}
	h := k.handled()
	refuse := func(helps, format string, args ...any) (Handled, error) {
		return h, &Refusal{row, fmt.Sprintf("input %d %s", row, fmt.Sprintf(format, args...)), helps}
	}
	switch {
	case k.state == InputPaused:
		return refuse("resume", "is not dead: run %s is paused at it", k.run)
	case k.state != InputDead:
		return refuse("", "is %s, not dead", k.state)
	}
	if err := k.wellFormed(); err != nil {
		return refuse("drop", "is malformed, and no agent can be given it: %s", cmp.Or(k.reason, err.Error()))
	}
	// An id stands for one input. If it is another's by now, this one would count under it a second time.
	var hash []byte
	var owner int64
	err = tx.Get(ctx, "SELECT hash, COALESCE(input, ?4) FROM seen WHERE tenant = ?1 AND run_name = ?2 AND input_id = ?3", []any{k.tenant, k.run, k.id, row}, &hash, &owner)
	switch {
	case errors.Is(err, sql.ErrNoRows):
	case err != nil:
		return h, fmt.Errorf("look up input %s: %w", k.id, err)
	case string(hash) != string(k.hash()) || owner != row:
		return refuse("drop", "cannot be requeued: its id %q belongs to another input of run %s", k.id, k.run)
	}
	switch {
	case k.runID == 0:
		to, err := placeOf(ctx, tx, k.arrival)
		if errors.Is(err, ErrNotFound) {
			return refuse("", "has nowhere to go: agent %s was never hosted here and has no route", k.agent)
		}
		if err != nil {
			return h, err
		}
		if to.here() {
			k.runID, err = openRun(ctx, tx, k.arrival)
			if stray, serr := straysBefore(ctx, tx, k.arrival); err == nil && (stray || serr != nil) {
				k.runID, err = 0, serr // it goes the same way as those before it
			}
		}
		if errors.Is(err, ErrConflict) {
			return refuse("reopen", "cannot be requeued: %s", strings.TrimPrefix(err.Error(), ErrConflict.Error()+": "))
		}
		if err != nil {
			return h, err
		}
	case k.runAgent != k.agent:
		return refuse("drop", "is for agent %s, and run %s belongs to agent %s", k.agent, k.run, k.runAgent)
	case k.runStatus == "done" || k.runStatus == "failed":
		return refuse("reopen", "cannot be requeued: run %s is %s and takes no input", k.run, k.runStatus)
	}
	// Whoever asks for it has mended the routes that went round in a circle. From 0 its hops must not count again: a node that
	// passed it on takes it for the same one unless it comes with more of them.
	k.hops = min(k.hops, maxHops-1)
	h.NoExpiry = k.expires != 0 && k.expires <= tx.SteadyUS
	_, _, err = tx.Exec(ctx, `UPDATE inbox SET run = ?2, ended_us = NULL, outcome = NULL, reason = NULL, attempts = 0, next_us = NULL, last_error = NULL,
		expires_us = iif(expires_us <= ?3, NULL, expires_us), hops = ?4 WHERE id = ?1`, row, optionalUS(k.runID), tx.SteadyUS, k.hops)
	if err != nil {
		return h, fmt.Errorf("requeue input %d: %w", row, err)
	}
	if err := remember(ctx, tx, k.arrival, row, ""); err != nil {
		return h, err
	}
	if k.runID != 0 {
		// It may come before the input that its run waits to try again, whose attempts are not its own.
		_, _, err := tx.Exec(ctx, `UPDATE run SET status = 'ready', wake_us = ?4, claim_step = NULL, claim_input = NULL, attempts = 0, last_error = NULL, updated_us = ?5
			WHERE id = ?1 AND status = 'waiting' AND (SELECT (i.due_us, i.id) > (?2, ?3) FROM inbox i WHERE i.id = run.claim_input)`,
			k.runID, k.dueUS, row, tx.SteadyUS, tx.NowUS)
		if err != nil {
			return h, fmt.Errorf("requeue input %d: %w", row, err)
		}
		if err := wake(ctx, tx, k.runID, max(k.dueUS, tx.SteadyUS)); err != nil {
			return h, err
		}
	}
	return h, audit(ctx, tx, "requeue", k.subject(), reason)
}

func drop(ctx context.Context, tx *sqlite.Tx, tenant string, row int64, reason string) (Handled, error) {
	k, err := readKept(ctx, tx, tenant, row)
	if err != nil {
		return Handled{Row: row}, err
	}
	h := k.handled()
	switch k.state {
	case InputDropped:
		return h, nil
	case InputConsumed, InputCancelled, InputHanded:
		return h, &Refusal{row, fmt.Sprintf("input %d is %s", row, k.state), ""}
	}
	if reason == "" {
		reason = "by an operator"
	}
	_, _, err = tx.Exec(ctx, "UPDATE inbox SET ended_us = ?, outcome = 'dropped', reason = ?, next_us = NULL WHERE id = ?", tx.NowUS, reason, row)
	if err != nil {
		return h, fmt.Errorf("drop input %d: %w", row, err)
	}
	if k.runID != 0 {
		if err := letGo(ctx, tx, k.runID, row); err != nil {
			return h, err
		}
	}
	if k.reason != "" { // why it was dead is not lost
		reason += "; " + k.state + ": " + k.reason
	}
	return h, audit(ctx, tx, "drop", k.subject(), reason)
}

// subject names an input in the audit.
func (k *kept) subject() string {
	return k.tenant + "/" + k.run + " input " + strconv.FormatInt(k.row, 10) + " " + k.id
}

// audit notes what an operator did.
func audit(ctx context.Context, tx *sqlite.Tx, action, subject, detail string) error {
	_, _, err := tx.Exec(ctx, "INSERT INTO audit (at_us, action, subject, detail) VALUES (?, ?, ?, ?)", tx.NowUS, action, subject, optional(detail))
	if err != nil {
		return fmt.Errorf("note %s: %w", action, err)
	}
	return nil
}

// Resumed says where a run goes on.
type Resumed struct {
	Tenant string `json:"tenant"`
	Run    string `json:"run"`
	Branch string `json:"branch"`
	Step   int64  `json:"step"` // the last one
	LSN    int64  `json:"lsn"`  // of postrider.run.resumed
	Was    string `json:"was"`  // its status until then
}

// Resume has a paused run go on, with attempts and steps without input counted from 0, and says so on its topic. Errors:
// ErrInvalid, ErrNotFound, ErrConflict (it is not paused).
func Resume(ctx context.Context, store *sqlite.Store, tenant, run, reason string) (Resumed, error) {
	return goOn(ctx, store, tenant, run, reason, resume)
}

// Reopen has a run that is done or failed take inputs again, those among them that it left, and says so on its topic. A
// rewind to the step that ended it ends it again. Errors: ErrInvalid, ErrNotFound, ErrConflict (it is not over).
func Reopen(ctx context.Context, store *sqlite.Store, tenant, run, reason string) (Resumed, error) {
	return goOn(ctx, store, tenant, run, reason, reopen)
}

func goOn(ctx context.Context, store *sqlite.Store, tenant, run, reason string,
	do func(ctx context.Context, tx *sqlite.Tx, tenant, run, reason string) (Resumed, error)) (out Resumed, err error) {
	if err := checkReason(reason); err != nil {
		return Resumed{}, err
	}
	err = store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) (err error) {
		out, err = do(ctx, tx, tenant, run, reason)
		return err
	})
	if err != nil {
		return Resumed{}, err
	}
	return out, nil
}

func resume(ctx context.Context, tx *sqlite.Tx, tenant, run, reason string) (Resumed, error) {
	if reason == "" {
		reason = "by an operator"
	}
	return restart(ctx, tx, tenant, run, "resume", reason, "paused")
}

func reopen(ctx context.Context, tx *sqlite.Tx, tenant, run, reason string) (Resumed, error) {
	if reason != "" {
		reason = ": " + reason
	}
	return restart(ctx, tx, tenant, run, "reopen", "reopened"+reason, "done", "failed")
}

// restart makes a run of one of the statuses ready. What it does next is decided when it is claimed.
func restart(ctx context.Context, tx *sqlite.Tx, tenant, name, action, reason string, from ...string) (Resumed, error) {
	out := Resumed{Tenant: tenant, Run: name}
	var run int64
	var head outbox.Head
	var correlation, trace string
	err := tx.Get(ctx, `SELECT r.id, r.status, b.ulid, b.head_step, b.id, b.head_lsn, b.event_lsn, b.tail_id, b.head_bytes, COALESCE(i.correlation, ''), COALESCE(i.trace, '')
		FROM run r JOIN branch b ON b.id = r.live LEFT JOIN inbox i ON i.id = r.claim_input WHERE r.tenant = ? AND r.name = ? AND r.name <> ?`,
		[]any{tenant, name, record.NodeRun}, &run, &out.Was, &out.Branch, &out.Step, &head.Branch, &head.LSN, &head.EventLSN, &head.TailID, &head.Bytes, &correlation, &trace)
	if errors.Is(err, sql.ErrNoRows) {
		return Resumed{}, fmt.Errorf("%w: tenant %s has no run %s", ErrNotFound, tenant, name)
	}
	if err != nil {
		return Resumed{}, fmt.Errorf("%s run %s: %w", action, name, err)
	}
	if out.Was != from[0] && out.Was != from[len(from)-1] {
		return Resumed{}, fmt.Errorf("%w: run %s is %s, not %s", ErrConflict, name, out.Was, from[0])
	}
	event := record.Record{Kind: record.Event, Type: record.TypeRunResumed, Data: appendReason(nil, reason), Occurred: tx.NowUS, Correlation: correlation, Trace: trace}
	if head, err = appendTo(ctx, tx, head, out.Step, []record.Record{event}); err != nil {
		return Resumed{}, err
	}
	out.LSN = head.LSN
	_, _, err = tx.Exec(ctx, "UPDATE inbox SET attempts = 0, next_us = NULL, last_error = NULL WHERE id = (SELECT claim_input FROM run WHERE id = ?)", run)
	if err == nil {
		_, _, err = tx.Exec(ctx, `UPDATE run SET status = 'ready', wake_us = ?, claim = claim + 1, claim_step = NULL, claim_input = NULL, attempts = 0, continues = 0,
			last_error = NULL, updated_us = ? WHERE id = ?`, tx.SteadyUS, tx.NowUS, run)
	}
	if err != nil {
		return Resumed{}, fmt.Errorf("%s run %s: %w", action, name, err)
	}
	return out, audit(ctx, tx, action, tenant+"/"+name, reason)
}
