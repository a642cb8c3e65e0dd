package outbox

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"math"
	"slices"
	"strings"
)

// States are all states of a record.
var States = []string{"pending", "shipped", "withheld", "dead", "expired"}

// Filter chooses what List lists. The zero value of a field does not filter, but States and Limit must be set.
type Filter struct {
	Tenant, Run string
	States      []string // of States
	Kind        string   // event, command, message
	Type        string
	After       int64 // only records with a greater Listed.ID
	Limit       int
}

// Listed is a record as an operator sees it.
type Listed struct {
	ID                  int64 // order of commit
	Tenant, Run, Branch string
	Gen, LSN, Step      int64
	Kind, Type          string
	Destination         string // topic of a message, agent@node of a command
	State               string
	RecordedUS          int64
	Bytes               int64 // of data
	// Why it waits, of a branch's first pending record, behind which the others of the branch wait: deliveries without a
	// PUBACK, the branch's last error or else that of the relay's last session, and when the next try is. Why it died, of
	// a dead one.
	Deliveries int64
	LastError  string
	NextUS     int64 // by the wall clock; 0: now, or not known

	holdUS int64 // the branch's, in steady time
}

// List lists records in order of their commit, at most Limit of them, and says whether there are more. Without shipped
// ones it reads no more of the table than the branches that have unshipped records make it, however many were shipped.
func (o *Outbox) List(ctx context.Context, f Filter) (list []Listed, more bool, err error) {
	tx, err := o.store.Reader().BeginTx(ctx, nil)
	if err != nil {
		return nil, false, fmt.Errorf("list records: %w", err)
	}
	defer tx.Rollback()
	if slices.Contains(f.States, "shipped") && f.Run == "" {
		list, err = f.scan(ctx, tx, listQuery("outbox o"), strings.Join(f.States, " "))
	} else {
		list, err = f.listRanges(ctx, tx)
	}
	if err != nil {
		return nil, false, fmt.Errorf("list records: %w", err)
	}
	if more = len(list) > f.Limit; more {
		list = list[:f.Limit]
	}
	for i := range list { // the relay's own next try is one by the wall clock
		if l := &list[i]; l.holdUS != 0 {
			l.NextUS, l.holdUS = o.store.Wall(l.holdUS), 0
		}
	}
	return list, more, nil
}

// span is a part (lo, hi] of a branch in which wanted records may be.
type span struct {
	branch, lo, hi int64
	low            int64 // its records have greater ids
	states         string
}

// listRanges merges the spans by id. They come in order of a lower bound of their ids, so that only those are read which
// may have one of the first records.
func (f Filter) listRanges(ctx context.Context, tx *sql.Tx) (list []Listed, err error) {
	spans, err := f.spans(ctx, tx)
	if err != nil {
		return nil, err
	}
	slices.SortFunc(spans, func(a, b span) int { return cmp.Compare(a.low, b.low) })
	byID := func(a, b Listed) int { return cmp.Compare(a.ID, b.ID) }
	upTo := int64(math.MaxInt64) // where the list is full
	for _, s := range spans {
		if s.low >= upTo {
			break
		}
		got, err := f.read(ctx, tx, s, upTo)
		if err != nil {
			return nil, err
		}
		if list = append(list, got...); len(list) > f.Limit {
			slices.SortFunc(list, byID)
			list = list[:f.Limit+1]
			upTo = list[f.Limit].ID
		}
	}
	slices.SortFunc(list, byID)
	return list, nil
}

// The spans of each state; ?1 is the tenant, ?2 the run. Dead ones are found by blocks, which end where the index has a mark.
const (
	pendingSpans  = `SELECT b.id, b.shipped, b.exportable, b.backlog_id - 1, 'pending withheld' FROM branch b %s WHERE b.shipped < b.exportable AND %s`
	withheldSpans = `SELECT b.id, max(b.shipped, b.exportable), b.head_lsn, 0, 'withheld' FROM branch b %s WHERE b.exportable < b.head_lsn AND b.shipped < b.head_lsn AND %s`
	deadSpans     = `SELECT d.branch, min(d.lsn) - 1, max(d.lsn), 0, 'dead expired' FROM dead d JOIN branch b ON b.id = d.branch
		WHERE (d.reason = 'expired' OR d.requeued_us IS NULL) AND %s GROUP BY d.branch, (d.lsn - 1) / 16`
	passedSpans = `SELECT o.branch, min(o.lsn) - 1, max(o.lsn), 0, 'withheld' FROM outbox o INDEXED BY outbox_creator JOIN branch b ON b.id = o.branch
		WHERE o.creator_branch IS NOT NULL AND o.withheld_us IS NOT NULL AND o.lsn <= b.shipped AND %s GROUP BY o.branch, (o.lsn - 1) / 16`
	wholeSpans = `SELECT b.id, b.fork_lsn, b.head_lsn, 0, 'pending shipped withheld dead expired' FROM branch b WHERE %s`
)

func (f Filter) spansQuery() string {
	of, backlog, withheld := "(?1 = '' OR b.tenant = ?1) AND ?2 = ''", "INDEXED BY branch_backlog", "INDEXED BY branch_withheld"
	if f.Run != "" {
		of, backlog, withheld = "b.run IN (SELECT id FROM run WHERE name = ?2 AND (?1 = '' OR tenant = ?1))", "", ""
	}
	wants := func(states ...string) bool {
		return slices.ContainsFunc(states, func(s string) bool { return slices.Contains(f.States, s) })
	}
	var parts []string
	if wants("shipped") {
		parts = append(parts, fmt.Sprintf(wholeSpans, of))
	} else {
		if wants("pending", "withheld") { // a handed-over input is withheld in its own row
			parts = append(parts, fmt.Sprintf(pendingSpans, backlog, of))
		}
		if wants("withheld") {
			parts = append(parts, fmt.Sprintf(withheldSpans, withheld, of), fmt.Sprintf(passedSpans, of))
		}
		if wants("dead", "expired") {
			parts = append(parts, fmt.Sprintf(deadSpans, of))
		}
	}
	// Nothing of a span has an id above that of the record where reading it begins.
	return `WITH spans (branch, lo, hi, low, states) AS (` + strings.Join(parts, " UNION ALL ") + `)
		SELECT s.branch, s.lo, s.hi, max(s.low, COALESCE((SELECT m.id FROM outbox m WHERE m.branch = s.branch AND m.lsn = s.lo / 16 * 16 AND m.lsn % 16 = 0), 0)), s.states
		FROM spans s WHERE ?3 < COALESCE((SELECT m.id FROM outbox m WHERE m.branch = s.branch AND m.lsn = (s.hi + 15) / 16 * 16 AND m.lsn % 16 = 0),
			(SELECT tail_id FROM branch WHERE id = s.branch))`
}

func (f Filter) spans(ctx context.Context, tx *sql.Tx) (list []span, err error) {
	rows, err := tx.QueryContext(ctx, f.spansQuery(), f.Tenant, f.Run, f.After)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var s span
		if err := rows.Scan(&s.branch, &s.lo, &s.hi, &s.low, &s.states); err != nil {
			return nil, err
		}
		list = append(list, s)
	}
	return list, rows.Err()
}

// read reads the first wanted records of a span, up to one more than the limit, in chunks that end at marks.
func (f Filter) read(ctx context.Context, tx *sql.Tx, s span, upTo int64) (list []Listed, err error) {
	if f.After > 0 { // where the records after it begin, as far as marks tell
		if err := tx.QueryRowContext(ctx, skipQuery, s.branch, s.lo, s.hi, f.After).Scan(&s.lo); err != nil {
			return nil, err
		}
	}
	chunk := (int64(f.Limit)/stride + 1) * stride
	var wanted string
	for _, state := range strings.Fields(s.states) {
		if slices.Contains(f.States, state) {
			wanted += state + " "
		}
	}
	for s.lo < s.hi && len(list) <= f.Limit {
		hi := min(s.hi, (s.lo+chunk)/stride*stride)
		got, err := f.scan(ctx, tx, listQuery(chunkOfSpan), wanted, s.branch, s.lo, hi)
		if err != nil {
			return nil, err
		}
		list = append(list, got...)
		s.lo = hi
		if n := len(list); n > 0 && list[n-1].ID >= upTo {
			break
		}
	}
	return list, nil
}

const skipQuery = "SELECT COALESCE(max(lsn), ?2) FROM outbox WHERE branch = ?1 AND lsn > ?2 AND lsn <= ?3 AND lsn % 16 = 0 AND id <= ?4"

// chunkOfSpan is the records (?8, ?9] of branch ?7, from the mark at or after ?9, or the newest record, down the chain.
const chunkOfSpan = `(WITH RECURSIVE walk (id, prev_id, lsn) AS (
	SELECT id, prev_id, lsn FROM outbox WHERE id = COALESCE((SELECT id FROM outbox WHERE branch = ?7 AND lsn = (?9 + 15) / 16 * 16 AND lsn % 16 = 0),
		(SELECT tail_id FROM branch WHERE id = ?7))
	UNION ALL SELECT n.id, n.prev_id, n.lsn FROM walk w JOIN outbox n ON n.id = w.prev_id WHERE w.lsn > ?8 + 1)
	SELECT id FROM walk WHERE lsn > ?8 AND lsn <= ?9) w CROSS JOIN outbox o ON o.id = w.id`

// listQuery lists records of from, which ends with table outbox as o. View record_state says what state is. The joins are
// CROSS because the order of the tables matters: SQLite would rather scan the outbox by id, which is the order asked for.
func listQuery(from string) string {
	first := "iif(s.state = 'pending' AND s.lsn = b.shipped + 1, %s, %s)"
	return `SELECT s.id, s.tenant, s.run, s.branch, s.gen, s.lsn, s.step, s.kind, s.type, s.destination, s.state, s.recorded_us, length(o.data),
		` + fmt.Sprintf(first, "b.deliveries", "0") + `,
		` + fmt.Sprintf(first, "COALESCE(b.last_error, l.last_error, '')", "iif(s.state = 'dead', COALESCE(d.last_error, ''), '')") + `,
		` + fmt.Sprintf(first, "COALESCE(l.next_us, 0)", "0") + `,
		` + fmt.Sprintf(first, "COALESCE(b.hold_us, 0)", "0") + `
		FROM ` + from + ` CROSS JOIN record_state s ON s.id = o.id CROSS JOIN branch b ON b.id = o.branch
		LEFT JOIN dead d ON d.branch = o.branch AND d.lsn = o.lsn LEFT JOIN relay_lease l ON l.id = 1
		WHERE o.id > ?1 AND (?2 = '' OR b.tenant = ?2) AND (?3 = '' OR s.kind = ?3) AND (?4 = '' OR o.type = ?4)
			AND instr(?5, s.state) > 0 ORDER BY o.id LIMIT ?6`
}

func (f Filter) scan(ctx context.Context, tx *sql.Tx, query, states string, span ...any) (list []Listed, err error) {
	rows, err := tx.QueryContext(ctx, query, append([]any{f.After, f.Tenant, f.Kind, f.Type, states, f.Limit + 1}, span...)...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var l Listed
		if err := rows.Scan(&l.ID, &l.Tenant, &l.Run, &l.Branch, &l.Gen, &l.LSN, &l.Step, &l.Kind, &l.Type, &l.Destination, &l.State, &l.RecordedUS,
			&l.Bytes, &l.Deliveries, &l.LastError, &l.NextUS, &l.holdUS); err != nil {
			return nil, err
		}
		list = append(list, l)
	}
	return list, rows.Err()
}
