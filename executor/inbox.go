package executor

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"

	"postrider/internal/record"
	"postrider/internal/sqlite"
)

// The states of an input. Those up to Elsewhere are not over yet.
const (
	InputWaiting   = "waiting"   // its time has not come
	InputPending   = "pending"   // due; waits for its run
	InputRunning   = "running"   // in hand
	InputPaused    = "paused"    // its run is paused at it
	InputUnhosted  = "unhosted"  // due, and nobody here has its agent
	InputElsewhere = "elsewhere" // due, and belongs to another node: will be handed over
	InputConsumed  = "consumed"
	InputCancelled = "cancelled" // by the agent that sent it
	InputDead      = "dead"
	InputHanded    = handedOver
	InputDropped   = "dropped" // by an operator
)

// InputStates are all states of an input; the first LiveStates of them are those that are not over.
var InputStates = []string{InputWaiting, InputPending, InputRunning, InputPaused, InputUnhosted, InputElsewhere,
	InputConsumed, InputCancelled, InputDead, InputHanded, InputDropped}

// toNode begins the reason of an input that was handed over; the node follows.
const toNode = "to node "

// LiveStates is how many of InputStates are not over.
const LiveStates = 6

// InputInfo is an input as an operator sees it.
type InputInfo struct {
	Row                           int64 // inbox.id: in order of arrival, unique in this database
	Tenant, Run, Agent            string
	Node                          string // an explicit @node; of one that is elsewhere or handed over, the node it goes or went to
	ID, Type, Source              string
	State                         string // of InputStates
	ArrivedUS                     int64
	DueUS, NextUS, ExpiresUS      int64 // wall clock; 0: none
	Attempts, Hops                int64
	LastError                     string
	Reason                        string // of a state that ended it; of one that is not over, what it waits for, unless just for its turn
	Branch                        string // where it was consumed, or cancelled
	Step                          int64
	EndedUS                       int64 // 0: not over, consumed or cancelled
	Correlation, Causation, Trace string
	Data                          []byte // as it came; nil unless asked for
	RunStatus                     string // run.status; "": there is no such run here
}

// inputQuery reads inputs with what became of them; ?1 is steady time, ?2 asks for data. The part after it chooses rows i.
const inputQuery = `SELECT i.id, i.tenant, i.run_name, i.agent, COALESCE(i.node, t.node, ''), i.input_id, i.type, i.source, ` + inputState + `,
	i.arrived_us, i.due_us, COALESCE(i.next_us, 0), COALESCE(i.expires_us, 0), iif(r.claim_input = i.id, max(r.attempts, i.attempts), i.attempts), i.hops,
	COALESCE(i.last_error, ''), COALESCE(i.reason, ''), COALESCE(b.ulid, ''), COALESCE(i.consumed_step, i.cancelled_step, 0), COALESCE(i.ended_us, 0),
	COALESCE(i.correlation, ''), COALESCE(i.causation, ''), COALESCE(i.trace, ''), iif(?2, i.data, NULL), COALESCE(r.status, ''), COALESCE(r.claim_input, 0),
	iif(t.best_effort, COALESCE(l.last_error, ''), ''), iif(t.best_effort, COALESCE(l.next_us, 0), 0)
	FROM inbox i LEFT JOIN branch b ON b.id = COALESCE(i.consumed_branch, i.cancelled_branch) LEFT JOIN relay_lease l ON l.id = 1` + inputJoins

const (
	// Where one without a run goes is decided as in placeOf: a run that has a step here, or inputs that go before this one,
	// takes it.
	inputJoins = ` LEFT JOIN run r ON r.id = i.run LEFT JOIN agent g ON i.run IS NULL AND g.name = i.agent
		LEFT JOIN route t ON i.run IS NULL AND i.node IS NULL AND i.ended_us IS NULL AND NOT COALESCE(g.hosted, 0) AND t.agent = i.agent AND NOT EXISTS (
			SELECT 1 FROM run o WHERE o.tenant = i.tenant AND o.name = i.run_name AND o.agent = i.agent AND (
				EXISTS (SELECT 1 FROM branch WHERE run = o.id AND head_step > 0)
				OR EXISTS (SELECT 1 FROM inbox w WHERE w.run = o.id AND w.consumed_branch IS NULL AND w.cancelled_branch IS NULL AND w.ended_us IS NULL))) `
	inputState = `CASE WHEN i.outcome IS NOT NULL THEN i.outcome
		WHEN i.cancelled_branch IS NOT NULL THEN 'cancelled'
		WHEN i.consumed_branch IS NOT NULL THEN 'consumed'
		WHEN i.due_us > ?1 THEN 'waiting'
		WHEN r.id IS NULL AND COALESCE(i.node, t.node, (SELECT node FROM meta)) <> (SELECT node FROM meta) THEN 'elsewhere'
		WHEN r.id IS NULL THEN iif(g.hosted, 'pending', 'unhosted')
		WHEN r.status = 'unhosted' THEN 'unhosted'
		WHEN r.claim_input = i.id AND (r.status = 'running' AND r.claim_alone IS NOT NULL OR r.status = 'paused') THEN r.status
		ELSE 'pending' END`
	inputLive = "i.consumed_branch IS NULL AND i.cancelled_branch IS NULL AND i.ended_us IS NULL"
)

func scanInputs(store *sqlite.Store, rows *sql.Rows) (list []InputInfo, err error) {
	defer rows.Close()
	now := store.Wall(store.SteadyUS())
	for rows.Next() {
		var in InputInfo
		var inHand, sessionUS int64
		var noSession string // best effort: why the relay, which takes it from here, has no connection, and when it tries again
		if err := rows.Scan(&in.Row, &in.Tenant, &in.Run, &in.Agent, &in.Node, &in.ID, &in.Type, &in.Source, &in.State,
			&in.ArrivedUS, &in.DueUS, &in.NextUS, &in.ExpiresUS, &in.Attempts, &in.Hops, &in.LastError, &in.Reason, &in.Branch, &in.Step, &in.EndedUS,
			&in.Correlation, &in.Causation, &in.Trace, &in.Data, &in.RunStatus, &inHand,
			&noSession, &sessionUS); err != nil {
			return nil, err
		}
		for _, us := range []*int64{&in.DueUS, &in.NextUS, &in.ExpiresUS} {
			if *us != 0 {
				*us = store.Wall(*us)
			}
		}
		if in.State == InputElsewhere && noSession != "" {
			in.NextUS = max(in.NextUS, sessionUS)
		}
		if in.NextUS <= now { // it is over, or what it waits for is not that time
			in.NextUS = 0
		}
		switch {
		case in.Reason == "":
			in.Reason = in.waitsFor(inHand, noSession)
		case in.State == InputHanded && in.Node == "":
			in.Node = strings.TrimPrefix(in.Reason, toNode)
		}
		list = append(list, in)
	}
	return list, rows.Err()
}

// waitsFor says what keeps an input that is not over; "" when that is only its turn.
func (in *InputInfo) waitsFor(inHand int64, noSession string) string {
	if in.RunOver() {
		return "its run is " + in.RunStatus
	}
	switch in.State {
	case InputPending:
		switch {
		case in.RunStatus == "paused" && inHand != 0:
			return fmt.Sprintf("its run is paused at input %d", inHand)
		case in.RunStatus == "paused":
			return "its run is paused"
		}
	case InputUnhosted:
		return "agent " + in.Agent + " is not hosted here"
	case InputElsewhere:
		if noSession != "" {
			return "goes to node " + in.Node + ", and the relay has no session: " + noSession
		}
		return "goes to node " + in.Node
	}
	return ""
}

// RunOver says that an input which is not over waits in vain: its run is done or failed, and takes none before it is reopened.
func (in *InputInfo) RunOver() bool {
	return slices.Contains(InputStates[:LiveStates], in.State) && (in.RunStatus == "done" || in.RunStatus == "failed")
}

// InputFilter chooses what Inputs lists. The zero value of a field does not filter, but States and Limit must be set.
type InputFilter struct {
	Tenant, Run, Agent string
	States             []string // of InputStates
	After              int64    // only inputs behind the one with this Row
	Limit              int
	Data               bool // with the data
}

// Inputs lists inputs in order of their due time, then of arrival, at most Limit of them, and says whether there are more.
// What was consumed is read only when it is asked for, and then only that of Run, which must be given. Errors: ErrInvalid,
// ErrNotFound (there is no input After).
func Inputs(ctx context.Context, store *sqlite.Store, f InputFilter) (list []InputInfo, more bool, err error) {
	if slices.Contains(f.States, InputConsumed) && f.Run == "" {
		return nil, false, fmt.Errorf("%w states: consumed inputs are listed of one run", ErrInvalid)
	}
	tx, err := store.Reader().BeginTx(ctx, nil)
	if err != nil {
		return nil, false, fmt.Errorf("list inputs: %w", err)
	}
	defer tx.Rollback()
	var afterDue int64
	if f.After != 0 {
		err := tx.QueryRowContext(ctx, "SELECT due_us FROM inbox WHERE id = ?", f.After).Scan(&afterDue)
		if errors.Is(err, sql.ErrNoRows) {
			return nil, false, fmt.Errorf("%w: there is no input %d", ErrNotFound, f.After)
		}
		if err != nil {
			return nil, false, fmt.Errorf("list inputs: %w", err)
		}
	}
	// The rows are chosen by small columns alone; only those that are listed are read with their data.
	chosen, args := f.query()
	rows, err := tx.QueryContext(ctx, inputQuery+"WHERE i.id IN ("+chosen+") ORDER BY i.due_us, i.id",
		append([]any{store.SteadyUS(), f.Data, f.Tenant, f.Run, f.Agent, afterDue, f.After, f.Limit + 1}, args...)...)
	if err != nil {
		return nil, false, fmt.Errorf("list inputs: %w", err)
	}
	if list, err = scanInputs(store, rows); err != nil {
		return nil, false, fmt.Errorf("list inputs: %w", err)
	}
	if more = len(list) > f.Limit; more {
		list = list[:f.Limit]
	}
	return list, more, nil
}

// query selects the ids of one page: ?1 steady time, ?3 tenant, ?4 run, ?5 agent, ?6 and ?7 the due time and row before
// it, ?8 the limit, and the states from ?9. Each state is found by an index that holds nothing else.
func (f InputFilter) query() (query string, states []any) {
	wants := func(some ...string) bool {
		return slices.ContainsFunc(some, func(s string) bool { return slices.Contains(f.States, s) })
	}
	runs, tenant := "(SELECT id FROM run WHERE name = ?4)", ""
	if f.Tenant != "" {
		runs, tenant = "(SELECT id FROM run WHERE tenant = ?3 AND name = ?4)", " AND i.tenant = ?3"
	}
	var from []string
	add := func(index, where string) {
		if f.Run == "" {
			from = append(from, "SELECT i.id FROM inbox i INDEXED BY "+index+" WHERE "+where)
			return
		}
		from = append(from, "SELECT i.id FROM inbox i INDEXED BY "+index+" WHERE "+where+" AND i.run IN "+runs)
	}
	without := func(index, where string) { // a run; it has only the name of one
		if f.Run != "" {
			from = append(from, "SELECT i.id FROM inbox i INDEXED BY "+index+" WHERE "+where+" AND i.run IS NULL AND i.run_name = ?4"+tenant)
		}
	}
	if wants(InputStates[:LiveStates]...) {
		add("inbox_pending", inputLive)
		without("inbox_stray", inputLive)
	}
	ended := slices.DeleteFunc([]string{InputDead, InputHanded, InputDropped}, func(s string) bool { return !slices.Contains(f.States, s) })
	if i := slices.Index(ended, InputDead); i >= 0 && f.Run == "" {
		ended = slices.Delete(ended, i, i+1)
		add("inbox_dead", "i.outcome = 'dead'"+tenant)
	}
	if len(ended) > 0 {
		outcomes := "i.outcome IN ('" + strings.Join(ended, "', '") + "')"
		add("inbox_ended", outcomes)
		without("inbox_ended", outcomes)
	}
	if wants(InputCancelled) {
		add("inbox_cancelled", "i.cancelled_branch IS NOT NULL")
		without("inbox_cancelled", "i.cancelled_branch IS NOT NULL")
	}
	if wants(InputConsumed) {
		from = append(from, `SELECT input FROM (WITH RECURSIVE walk (prev_id, input) AS (
			SELECT c.prev_id, c.input FROM branch b JOIN checkpoint c ON c.id = b.head_id AND c.branch = b.id WHERE b.run IN `+runs+`
			UNION ALL SELECT c.prev_id, c.input FROM walk w JOIN checkpoint c ON c.id = w.prev_id) SELECT input FROM walk WHERE input IS NOT NULL)`)
	}
	marks := make([]string, len(f.States))
	for i, s := range f.States {
		marks[i] = fmt.Sprint("?", 9+i)
		states = append(states, s)
	}
	return "SELECT i.id FROM (" + strings.Join(from, " UNION ") + ") x JOIN inbox i ON i.id = x.id" + inputJoins + `
		WHERE (?3 = '' OR i.tenant = ?3) AND (?5 = '' OR i.agent = ?5) AND (i.due_us, i.id) > (?6, ?7)
		AND ` + inputState + " IN (" + strings.Join(marks, ", ") + ") ORDER BY i.due_us, i.id LIMIT ?8", states
}

// ReadInput reads one input, with its data; ErrNotFound when there is none.
func ReadInput(ctx context.Context, store *sqlite.Store, row int64) (InputInfo, error) {
	rows, err := store.Reader().QueryContext(ctx, inputQuery+"WHERE i.id = ?3", store.SteadyUS(), true, row)
	if err != nil {
		return InputInfo{}, fmt.Errorf("read input %d: %w", row, err)
	}
	list, err := scanInputs(store, rows)
	if err != nil {
		return InputInfo{}, fmt.Errorf("read input %d: %w", row, err)
	}
	if len(list) == 0 {
		return InputInfo{}, fmt.Errorf("%w: there is no input %d", ErrNotFound, row)
	}
	return list[0], nil
}

// findQueries find an input by its id where no id remembers its row: one that nobody chose, or an old one. Each takes the
// tenant, the run and the id. They look at what is not over, then at what ended, then down the checkpoints of the run's
// branches from the newest, in that order (CROSS JOIN) and no further than the first; no index on ids slows down every
// input for that. What was handed over is not looked for: the node may have any number of those, and each has its id
// remembered, as has a command that another run cancelled.
var findQueries = []string{
	"SELECT id FROM inbox i WHERE i.run = (" + runID + ") AND " + inputLive + " AND i.input_id = ?3 ORDER BY i.id DESC LIMIT 1",
	"SELECT id FROM inbox i INDEXED BY inbox_stray WHERE i.run IS NULL AND " + inputLive + " AND i.tenant = ?1 AND i.run_name = ?2 AND i.input_id = ?3 ORDER BY i.id DESC LIMIT 1",
	"SELECT id FROM inbox i WHERE i.run = (" + runID + ") AND i.outcome IN ('dead', 'dropped') AND i.input_id = ?3 ORDER BY i.id DESC LIMIT 1",
	`SELECT input FROM (WITH RECURSIVE walk (prev_id, input) AS (
		SELECT * FROM (SELECT c.prev_id, c.input FROM branch b JOIN checkpoint c ON c.id = b.head_id AND c.branch = b.id WHERE b.run = (` + runID + `) ORDER BY b.gen DESC)
		UNION ALL SELECT c.prev_id, c.input FROM walk w JOIN checkpoint c ON c.id = w.prev_id) SELECT input FROM walk) w CROSS JOIN inbox i ON i.id = w.input
		WHERE i.input_id = ?3 LIMIT 1`,
	`SELECT i.id FROM inbox i INDEXED BY inbox_ended WHERE i.run IS NULL AND i.outcome IN ('dead', 'dropped')
		AND i.tenant = ?1 AND i.run_name = ?2 AND i.input_id = ?3 ORDER BY i.id DESC LIMIT 1`,
	"SELECT i.id FROM inbox i INDEXED BY inbox_cancelled WHERE i.cancelled_branch IN (SELECT id FROM branch WHERE run = (" + runID + ")) AND i.run = (" + runID + ") AND i.input_id = ?3 ORDER BY i.id DESC LIMIT 1",
}

const runID = "SELECT id FROM run WHERE tenant = ?1 AND name = ?2 AND name <> '" + record.NodeRun + "'"

// FindInput finds an input by its id in a run, with its data; of several under one id, as dead letters with other content,
// the one that the id stands for. ErrNotFound when there is none.
func FindInput(ctx context.Context, store *sqlite.Store, tenant, run, id string) (InputInfo, error) {
	var row sql.NullInt64
	err := store.Reader().QueryRowContext(ctx, "SELECT input FROM seen WHERE tenant = ? AND run_name = ? AND input_id = ?", tenant, run, id).Scan(&row)
	for i := 0; i < len(findQueries) && !row.Valid && (err == nil || errors.Is(err, sql.ErrNoRows)); i++ {
		err = store.Reader().QueryRowContext(ctx, findQueries[i], tenant, run, id).Scan(&row)
	}
	switch {
	case row.Valid:
		return ReadInput(ctx, store, row.Int64)
	case err == nil || errors.Is(err, sql.ErrNoRows):
		return InputInfo{}, fmt.Errorf("%w: run %s has no input %q", ErrNotFound, run, id)
	}
	return InputInfo{}, fmt.Errorf("find input %s of run %s: %w", id, run, err)
}
