package executor

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	"postrider/internal/record"
	"postrider/internal/sqlite"
)

// RunInfo is a run as an operator sees it.
type RunInfo struct {
	Tenant, Run, Agent, Status string
	Branch                     string // the live one
	Gen                        int64
	Step, LSN                  int64  // head of the live branch
	Pending                    int64  // inputs that wait, timers among them
	Dead                       int64  // inputs that were set aside
	Attempts                   int64  // failed ones of the step in hand
	LastError                  string // of the step in hand, else why the newest dead input was set aside
	WakeUS, UpdatedUS          int64  // WakeUS by the wall clock; 0: nothing scheduled
}

// Runs lists runs in order of tenant and name, those after the given pair: tenant "" lists all tenants. The reserved ~node
// is no run, here and in all that follows.
func Runs(ctx context.Context, store *sqlite.Store, tenant string, afterTenant, afterRun string, limit int) ([]RunInfo, error) {
	rows, err := store.Reader().QueryContext(ctx, runQuery+`
		WHERE (?1 = '' OR r.tenant = ?1) AND (r.tenant, r.name) > (?2, ?3) AND r.name <> ?5 ORDER BY r.tenant, r.name LIMIT ?4`, tenant, afterTenant, afterRun, limit, record.NodeRun)
	if err != nil {
		return nil, fmt.Errorf("list runs: %w", err)
	}
	defer rows.Close()
	var list []RunInfo
	for rows.Next() {
		var r RunInfo
		if err := rows.Scan(r.dest()...); err != nil {
			return nil, fmt.Errorf("list runs: %w", err)
		}
		r.read(store)
		list = append(list, r)
	}
	return list, rows.Err()
}

// read turns a time that the run is scheduled by into what people read.
func (r *RunInfo) read(store *sqlite.Store) {
	if r.WakeUS != 0 {
		r.WakeUS = store.Wall(r.WakeUS)
	}
}

// A run that waits for its turn alone is ready: it is not in hand.
const runQuery = `SELECT r.tenant, r.name, r.agent, iif(r.status = 'running' AND r.claim_alone IS NULL, 'ready', r.status), b.ulid, b.gen, b.head_step, b.head_lsn,
	(SELECT count(*) FROM inbox i WHERE i.run = r.id AND i.consumed_branch IS NULL AND i.cancelled_branch IS NULL AND i.ended_us IS NULL),
	(SELECT count(*) FROM inbox i WHERE i.run = r.id AND i.outcome = 'dead'),
	r.attempts, COALESCE(r.last_error, (SELECT reason FROM inbox i WHERE i.run = r.id AND i.outcome = 'dead' ORDER BY i.id DESC LIMIT 1), ''), COALESCE(r.wake_us, 0), r.updated_us FROM run r JOIN branch b ON b.id = r.live`

func (r *RunInfo) dest() []any {
	return []any{&r.Tenant, &r.Run, &r.Agent, &r.Status, &r.Branch, &r.Gen, &r.Step, &r.LSN, &r.Pending, &r.Dead, &r.Attempts, &r.LastError, &r.WakeUS, &r.UpdatedUS}
}

// RunNames lists a tenant's runs that begin with prefix, by name: those of one agent, or for "" of all.
func RunNames(ctx context.Context, store *sqlite.Store, tenant, agent, prefix string, limit int) ([]string, error) {
	return names(ctx, store, "SELECT name FROM run WHERE tenant = ? AND name >= ? AND name < ? AND name <> ? AND ? IN ('', agent) ORDER BY name LIMIT ?",
		tenant, prefix, prefix+"~", record.NodeRun, agent, limit)
}

// RunNamesIn is RunNames for runs in one of the statuses.
func RunNamesIn(ctx context.Context, store *sqlite.Store, tenant string, statuses []string, prefix string, limit int) ([]string, error) {
	return names(ctx, store, `SELECT name FROM run WHERE tenant = ? AND name >= ? AND name < ? AND name <> ? AND instr(?, ' ' || status || ' ') ORDER BY name LIMIT ?`,
		tenant, prefix, prefix+"~", record.NodeRun, " "+strings.Join(statuses, " ")+" ", limit)
}

// AgentNames lists the agents that were ever hosted here, or have a route, and begin with prefix.
func AgentNames(ctx context.Context, store *sqlite.Store, prefix string, limit int) ([]string, error) {
	return names(ctx, store, "SELECT name FROM (SELECT name FROM agent UNION SELECT agent FROM route) WHERE name >= ? AND name < ? ORDER BY name LIMIT ?",
		prefix, prefix+"~", limit)
}

// NodeNames lists the nodes that this one knows, itself among them, and begin with prefix.
func NodeNames(ctx context.Context, store *sqlite.Store, prefix string, limit int) ([]string, error) {
	return names(ctx, store, "SELECT node FROM (SELECT node FROM meta UNION SELECT node FROM route) WHERE node >= ? AND node < ? ORDER BY node LIMIT ?",
		prefix, prefix+"~", limit)
}

// names runs a query for names. No name has a ~ in it, or anything that sorts after it.
func names(ctx context.Context, store *sqlite.Store, query string, args ...any) (list []string, err error) {
	rows, err := store.Reader().QueryContext(ctx, query, args...)
	if err != nil {
		return nil, fmt.Errorf("list names: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			return nil, fmt.Errorf("list names: %w", err)
		}
		list = append(list, name)
	}
	return list, rows.Err()
}

// BranchInfo is one line of a run's history.
type BranchInfo struct {
	Branch   string `json:"branch"`
	Gen      int64  `json:"gen"`
	Parent   string `json:"parent"` // "": root
	ForkStep int64  `json:"fork_step"`
	ForkLSN  int64  `json:"fork_lsn"`
	Step     int64  `json:"step"`
	LSN      int64  `json:"lsn"`
	Shipped  int64  `json:"shipped"`
	Live     bool   `json:"live"`
}

// RunDetail is a run with its state and branches.
type RunDetail struct {
	RunInfo
	State    []byte // JSON, as the agent gave it
	Branches []BranchInfo
}

// Show reads one run in one snapshot; ErrNotFound when there is none.
func Show(ctx context.Context, store *sqlite.Store, tenant, run string) (RunDetail, error) {
	tx, err := store.Reader().BeginTx(ctx, nil)
	if err != nil {
		return RunDetail{}, fmt.Errorf("show run %s: %w", run, err)
	}
	defer tx.Rollback()
	var d RunDetail
	err = tx.QueryRowContext(ctx, runQuery+" WHERE r.tenant = ? AND r.name = ? AND r.name <> ?", tenant, run, record.NodeRun).Scan(d.dest()...)
	if errors.Is(err, sql.ErrNoRows) {
		return RunDetail{}, fmt.Errorf("%w: tenant %s has no run %s", ErrNotFound, tenant, run)
	}
	if err != nil {
		return RunDetail{}, fmt.Errorf("show run %s: %w", run, err)
	}
	d.read(store)
	err = tx.QueryRowContext(ctx, `SELECT COALESCE(c.state, (SELECT state FROM checkpoint WHERE id = c.base_id)) FROM run r JOIN branch b ON b.id = r.live
		JOIN checkpoint c ON c.id = b.head_id WHERE r.tenant = ? AND r.name = ?`, tenant, run).Scan(&d.State)
	if err != nil {
		return RunDetail{}, fmt.Errorf("load state of run %s: %w", run, err)
	}
	rows, err := tx.QueryContext(ctx, `SELECT b.ulid, b.gen, COALESCE(p.ulid, ''), b.fork_step, b.fork_lsn, b.head_step, b.head_lsn, b.shipped, b.id = r.live
		FROM run r JOIN branch b ON b.run = r.id LEFT JOIN branch p ON p.id = b.parent WHERE r.tenant = ? AND r.name = ? ORDER BY b.gen LIMIT 10000`, tenant, run)
	if err != nil {
		return RunDetail{}, fmt.Errorf("list branches of run %s: %w", run, err)
	}
	defer rows.Close()
	for rows.Next() {
		var b BranchInfo
		if err := rows.Scan(&b.Branch, &b.Gen, &b.Parent, &b.ForkStep, &b.ForkLSN, &b.Step, &b.LSN, &b.Shipped, &b.Live); err != nil {
			return RunDetail{}, fmt.Errorf("list branches of run %s: %w", run, err)
		}
		d.Branches = append(d.Branches, b)
	}
	return d, rows.Err()
}

// StepInfo is one step of a run's live lineage.
type StepInfo struct {
	Branch      string `json:"branch"`
	Step        int64  `json:"step"`
	Input       string `json:"input"` // input id; "": none
	InputType   string `json:"input_type"`
	LSN         int64  `json:"lsn"` // head after the step
	Next        string `json:"next"`
	StartedUS   int64  `json:"started_us"`
	CommittedUS int64  `json:"committed_us"`

	InputSource                   string
	Correlation, Causation, Trace string // of the input

	branch, row, input int64 // of the tables branch, checkpoint and inbox; input 0: none
}

func (s *StepInfo) dest() []any {
	return []any{&s.Step, &s.Input, &s.InputType, &s.LSN, &s.Next, &s.StartedUS, &s.CommittedUS, &s.InputSource, &s.Correlation, &s.Causation, &s.Trace,
		&s.row, &s.input}
}

// Steps lists the newest steps of a run's live lineage that are below before (0: from the head), newest first;
// ErrNotFound when there is no such run.
func Steps(ctx context.Context, store *sqlite.Store, tenant, run string, before int64, limit int) ([]StepInfo, error) {
	tx, err := store.Reader().BeginTx(ctx, nil)
	if err != nil {
		return nil, fmt.Errorf("list steps of run %s: %w", run, err)
	}
	defer tx.Rollback()
	return readSteps(ctx, tx, tenant, run, before, limit)
}

func readSteps(ctx context.Context, tx *sql.Tx, tenant, run string, before int64, limit int) ([]StepInfo, error) {
	var next int64
	err := tx.QueryRowContext(ctx, "SELECT live FROM run WHERE tenant = ? AND name = ? AND name <> ?", tenant, run, record.NodeRun).Scan(&next)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, fmt.Errorf("%w: tenant %s has no run %s", ErrNotFound, tenant, run)
	}
	if err != nil {
		return nil, fmt.Errorf("list steps of run %s: %w", run, err)
	}
	upTo := int64(1<<62) - 1
	if before != 0 {
		upTo = before - 1
	}
	var list []StepInfo
	for next != 0 && len(list) < limit {
		var branch, forkStep int64
		var ulid string
		if err := tx.QueryRowContext(ctx, "SELECT id, ulid, fork_step, COALESCE(parent, 0) FROM branch WHERE id = ?", next).Scan(&branch, &ulid, &forkStep, &next); err != nil {
			return nil, fmt.Errorf("list steps of run %s: %w", run, err)
		}
		err := func() error {
			rows, err := tx.QueryContext(ctx, stepsQuery, branch, upTo, limit-len(list))
			if err != nil {
				return err
			}
			defer rows.Close()
			for rows.Next() {
				s := StepInfo{Branch: ulid, branch: branch}
				if err := rows.Scan(s.dest()...); err != nil {
					return err
				}
				list = append(list, s)
			}
			return rows.Err()
		}()
		if err != nil {
			return nil, fmt.Errorf("list steps of run %s: %w", run, err)
		}
		upTo = min(upTo, forkStep)
	}
	return list, nil
}

// stepsQuery lists a branch's own steps from ?2 down, found as in stepQuery. A branch without a step of its own has its
// parent's checkpoint as head: the condition on branch leaves it out.
const stepsQuery = `WITH RECURSIVE walk (id, prev_id, step, input, lsn, next, started_us, committed_us) AS (
	SELECT id, prev_id, step, input, lsn, next, started_us, committed_us FROM checkpoint WHERE branch = ?1 AND id = COALESCE(
		(SELECT id FROM checkpoint WHERE branch = ?1 AND step = (?2 + 15) / 16 * 16 AND step % 16 = 0),
		(SELECT head_id FROM branch WHERE id = ?1))
	UNION ALL SELECT c.id, c.prev_id, c.step, c.input, c.lsn, c.next, c.started_us, c.committed_us FROM walk w JOIN checkpoint c ON c.id = w.prev_id)
	SELECT w.step, COALESCE(i.input_id, ''), COALESCE(i.type, ''), w.lsn, w.next, w.started_us, w.committed_us,
	COALESCE(i.source, ''), COALESCE(i.correlation, ''), COALESCE(i.causation, ''), COALESCE(i.trace, ''), w.id, COALESCE(w.input, 0)
	FROM walk w LEFT JOIN inbox i ON i.id = w.input WHERE w.step <= ?2 LIMIT ?3`
