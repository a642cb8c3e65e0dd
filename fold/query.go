package fold

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"postrider/internal/record"
)

var (
	// ErrNotFound: nothing of the run has arrived.
	ErrNotFound = errors.New("not found: nothing of this run has arrived")
	// ErrOtherName: the database belongs to a fold of another name.
	ErrOtherName = errors.New("this fold's name is")
)

// AmbiguousError: several nodes have a run of that name.
type AmbiguousError struct {
	Tenant, Run string
	Nodes       []string // ascending
}

func (e *AmbiguousError) Error() string {
	return fmt.Sprintf("run %s of tenant %s is on several nodes: %s", e.Run, e.Tenant, strings.Join(e.Nodes, ", "))
}

// Shown is a run as far as it is known without a gap: its live lineage, in order.
type Shown struct {
	Tenant, Node, Run string
	Branch            string // the live one; "": a restore left the run without any, or none is known yet
	LSN               int64  // of the last record; 0: none
	Records           []ShownRecord
}

// ShownRecord is one event of a lineage.
type ShownRecord struct {
	Branch string
	LSN    int64
	Type   string
	Data   []byte // the agent's bytes
}

// AppendJSON appends {"branch","lsn","type","data"} with data byte for byte.
func (r *ShownRecord) AppendJSON(dst []byte) []byte {
	dst = appendString(append(dst, `{"branch":`...), r.Branch)
	dst = strconv.AppendInt(append(dst, `,"lsn":`...), r.LSN, 10)
	dst = appendString(append(dst, `,"type":`...), r.Type)
	return append(append(append(dst, `,"data":`...), r.Data...), '}')
}

// AppendJSON appends {"tenant","node","run","branch","lsn","records":[…]}. It is not MarshalJSON because encoding/json
// would rewrite the data.
func (s *Shown) AppendJSON(dst []byte) []byte {
	dst = appendString(append(dst, `{"tenant":`...), s.Tenant)
	dst = appendString(append(dst, `,"node":`...), s.Node)
	dst = appendString(append(dst, `,"run":`...), s.Run)
	dst = appendString(append(dst, `,"branch":`...), s.Branch)
	dst = strconv.AppendInt(append(dst, `,"lsn":`...), s.LSN, 10)
	dst = append(dst, `,"records":[`...)
	for i := range s.Records {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = s.Records[i].AppendJSON(dst)
	}
	return append(dst, "]}"...)
}

// WriteJSON writes AppendJSON's form and a newline.
func (s *Shown) WriteJSON(w io.Writer) error {
	_, err := w.Write(append(s.AppendJSON(nil), '\n'))
	return err
}

// appendString appends a JSON string without the HTML escapes of json.Marshal, and with escapes for the control characters
// that it leaves as they are, DEL and U+0080 to U+009F, and those that turn the direction of writing: a terminal obeys them.
func appendString(dst []byte, s string) []byte {
	b := bytes.NewBuffer(nil)
	enc := json.NewEncoder(b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(s); err != nil {
		panic(err) // a string can always be encoded
	}
	for _, r := range string(b.Bytes()[:b.Len()-1]) { // without Encode's newline
		if r >= 0x7f && r < 0xa0 || unicode.Is(unicode.Bidi_Control, r) {
			dst = fmt.Appendf(dst, `\u%04x`, r)
		} else {
			dst = utf8.AppendRune(dst, r)
		}
	}
	return dst
}

// snapshot runs read in one read transaction, so that its queries agree with each other.
func (f *Fold) snapshot(ctx context.Context, read func(tx *sql.Tx) error) error {
	tx, err := f.store.Reader().BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
	if err != nil {
		return err
	}
	return errors.Join(read(tx), tx.Rollback())
}

// Show reads a run's live lineage up to its first gap. node may be "" when only one node has a run of that name; else
// the error is an *AmbiguousError. ErrNotFound when nothing of the run has arrived.
func (f *Fold) Show(ctx context.Context, tenant, run, node string) (*Shown, error) {
	s := &Shown{Tenant: tenant, Run: run}
	err := f.snapshot(ctx, func(tx *sql.Tx) error {
		id, err := find(ctx, tx, s, node)
		if err != nil {
			return err
		}
		pieces, err := lineage(ctx, tx, id)
		if err != nil || len(pieces) == 0 {
			return err
		}
		s.Branch = pieces[len(pieces)-1].ulid
		for i := range pieces {
			if more, err := s.read(ctx, tx, pieces, i); err != nil || !more {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("show run %s of tenant %s: %w", run, tenant, err)
	}
	return s, nil
}

// RunNames lists the names, each once, of a tenant's runs that begin with prefix.
func (f *Fold) RunNames(ctx context.Context, tenant, prefix string, limit int) (names []string, err error) {
	rows, err := f.store.Reader().QueryContext(ctx, "SELECT DISTINCT name FROM run WHERE tenant = ? AND name >= ? AND name < ? ORDER BY name LIMIT ?",
		tenant, prefix, prefix+"\U0010ffff", limit)
	if err != nil {
		return nil, fmt.Errorf("list runs: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			return nil, fmt.Errorf("list runs: %w", err)
		}
		names = append(names, name)
	}
	return names, rows.Err()
}

// find fills in the node and gives the run's row.
func find(ctx context.Context, tx *sql.Tx, s *Shown, node string) (id int64, err error) {
	rows, err := tx.QueryContext(ctx, `SELECT r.id, n.name FROM run r JOIN node n ON n.id = r.node
		WHERE r.tenant = ? AND r.name = ? AND (? = '' OR n.name = ?) ORDER BY n.name LIMIT 100`, s.Tenant, s.Run, node, node)
	if err != nil {
		return 0, err
	}
	defer rows.Close()
	var nodes []string
	for rows.Next() {
		if err := rows.Scan(&id, &s.Node); err != nil {
			return 0, err
		}
		nodes = append(nodes, s.Node)
	}
	if err := rows.Err(); err != nil {
		return 0, err
	}
	switch len(nodes) {
	case 0:
		return 0, ErrNotFound
	case 1:
		return id, nil
	}
	return 0, &AmbiguousError{Tenant: s.Tenant, Run: s.Run, Nodes: nodes}
}

// piece is the part (lo, hi] of a branch.
type piece struct {
	branch int64
	ulid   string
	lo, hi int64
}

// lineage walks view lineage for one run's live branch, root first: SQLite cannot look for one run in a recursive view
// without making it for all. The property test holds the two together.
func lineage(ctx context.Context, tx *sql.Tx, run int64) ([]piece, error) {
	rows, err := tx.QueryContext(ctx, `WITH RECURSIVE chain (depth, branch, ulid, lo, hi) AS (
			SELECT 0, b.id, b.ulid, b.fork_lsn, 9223372036854775807 FROM live v JOIN branch b ON b.id = v.branch WHERE v.run = ?
			UNION ALL
			SELECT c.depth + 1, p.id, p.ulid, p.fork_lsn, min(c.lo, c.hi)
			FROM chain c JOIN branch b ON b.id = c.branch JOIN branch p ON p.id = b.parent AND p.gen < b.gen)
		SELECT branch, ulid, lo, hi FROM chain ORDER BY depth DESC`, run)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var pieces []piece
	for rows.Next() {
		var p piece
		if err := rows.Scan(&p.branch, &p.ulid, &p.lo, &p.hi); err != nil {
			return nil, err
		}
		pieces = append(pieces, p)
	}
	return pieces, rows.Err()
}

// read adds the records of pieces[i]; more is false at a gap.
func (s *Shown) read(ctx context.Context, tx *sql.Tx, pieces []piece, i int) (more bool, err error) {
	p := pieces[i]
	rows, err := tx.QueryContext(ctx, `SELECT lsn, prevlsn, type, data FROM record
		WHERE branch = ? AND shown = 1 AND lsn > ? AND lsn <= ? ORDER BY lsn`, p.branch, p.lo, p.hi)
	if err != nil {
		return false, err
	}
	defer rows.Close()
	for rows.Next() {
		r := ShownRecord{Branch: p.ulid}
		var prev int64
		if err := rows.Scan(&r.LSN, &prev, &r.Type, &r.Data); err != nil {
			return false, err
		}
		if prev != s.LSN {
			in, err := inHole(ctx, tx, pieces, prev)
			if err != nil || !in {
				return false, err
			}
		}
		s.Records = append(s.Records, r)
		s.LSN = r.LSN
	}
	return true, rows.Err()
}

func inHole(ctx context.Context, tx *sql.Tx, pieces []piece, lsn int64) (in bool, err error) {
	for _, p := range pieces {
		if lsn <= p.lo || lsn > p.hi {
			continue
		}
		err = tx.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM hole WHERE branch = ? AND ? BETWEEN lo AND hi)", p.branch, lsn).Scan(&in)
		if err != nil || in {
			return in, err
		}
	}
	return false, nil
}

// Held is the greatest LSN that is stored of a branch; 0: none.
func (f *Fold) Held(ctx context.Context, node string, key record.BranchKey) (lsn int64, err error) {
	err = f.store.Reader().QueryRowContext(ctx, `SELECT coalesce(max(r.lsn), 0) FROM record r WHERE r.shown = 1 AND r.branch =
		(SELECT b.id FROM branch b JOIN run u ON u.id = b.run JOIN node n ON n.id = u.node
		 WHERE n.name = ? AND u.tenant = ? AND u.name = ? AND b.ulid = ?)`, node, key.Tenant, key.Run, key.Branch).Scan(&lsn)
	if err != nil {
		return 0, fmt.Errorf("read what is held of %s: %w", key.Branch, err)
	}
	return lsn, nil
}

// Verification says whether anything is missing or contradicts itself. As JSON it is what `fold verify -o json` prints.
// Records = shown + parked + abandoned.
type Verification struct {
	Runs       int64 `json:"runs"`
	Records    int64 `json:"records"`    // keys that are held
	Duplicates int64 `json:"duplicates"` // redeliveries that changed nothing
	Gaps       int64 `json:"gaps"`
	Parked     int64 `json:"parked"` // held, but not shown because of a gap before them
	Conflicts  int64 `json:"conflicts"`
	Holes      int64 `json:"holes"`     // ranges that retention removed at the node
	Abandoned  int64 `json:"abandoned"` // undone by a rewind or a restore
	Malformed  int64 `json:"malformed"` // messages that were no event; they are no fault of a run

	// Findings has the first maxFindings gaps and as many conflicts, in the order of tenant, run, node.
	Findings []Finding `json:"-"`
}

// OK says that nothing is missing and nothing contradicts itself.
func (v *Verification) OK() bool { return v.Gaps == 0 && v.Parked == 0 && v.Conflicts == 0 }

// Finding is one thing that is wrong with a run.
type Finding struct {
	What              string // "gap" or "conflict"
	Tenant, Node, Run string
	Branch            string // where the record after the gap is, or the conflict
	After             int64  // gap: the last event before it; 0: none
	Missing           int64  // gap: LSN of an event that is missing
	LSN               int64  // gap: the first event after it, 0: none has come; conflict: the LSN
	Contents          int64  // conflict: how many
}

// maxFindings bounds each list of Verification.Findings.
const maxFindings = 1000

// Verify goes through everything that is stored. It takes one to three seconds for a million records: BenchmarkVerify.
func (f *Fold) Verify(ctx context.Context) (*Verification, error) {
	v := &Verification{}
	err := f.snapshot(ctx, func(tx *sql.Tx) error {
		err := tx.QueryRowContext(ctx, `SELECT (SELECT count(*) FROM run), (SELECT count(*) FROM record WHERE shown = 1),
			(SELECT duplicates FROM meta WHERE id = 1), (SELECT count(*) FROM conflict), (SELECT count(*) FROM hole),
			(SELECT coalesce(max(id), 0) FROM malformed),
			(SELECT count(*) FROM lineage c JOIN record r ON r.branch = c.branch AND r.shown = 1 AND r.lsn > c.lo AND r.lsn <= c.hi)`).
			Scan(&v.Runs, &v.Records, &v.Duplicates, &v.Conflicts, &v.Holes, &v.Malformed, &v.Abandoned)
		if err != nil {
			return err
		}
		v.Abandoned = v.Records - v.Abandoned
		if err := v.gaps(ctx, tx); err != nil {
			return err
		}
		if v.Conflicts > 0 {
			return v.conflicts(ctx, tx)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("verify: %w", err)
	}
	return v, nil
}

func (v *Verification) gaps(ctx context.Context, tx *sql.Tx) error {
	// View parked, but for the gaps that are at hand here: to find them is most of the work.
	rows, err := tx.QueryContext(ctx, `WITH g AS MATERIALIZED (SELECT run, head, branch, after, missing, next FROM gap),
			parked AS (SELECT count(*) AS n
				FROM (SELECT head, min(next) AS next FROM g GROUP BY head) f
				JOIN lineage c ON c.head = f.head
				JOIN record r ON r.branch = c.branch AND r.shown = 1 AND r.lsn > c.lo AND r.lsn <= c.hi AND r.lsn >= f.next)
		SELECT count(*) OVER (), (SELECT n FROM parked), r.tenant, n.name, r.name, b.ulid, g.after, g.missing, coalesce(g.next, 0)
		FROM g JOIN run r ON r.id = g.run JOIN node n ON n.id = r.node JOIN branch b ON b.id = g.branch
		ORDER BY r.tenant, r.name, n.name, b.ulid, g.after LIMIT ?`, maxFindings)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		g := Finding{What: "gap"}
		if err := rows.Scan(&v.Gaps, &v.Parked, &g.Tenant, &g.Node, &g.Run, &g.Branch, &g.After, &g.Missing, &g.LSN); err != nil {
			return err
		}
		v.Findings = append(v.Findings, g)
	}
	return rows.Err()
}

func (v *Verification) conflicts(ctx context.Context, tx *sql.Tx) error {
	rows, err := tx.QueryContext(ctx, `SELECT r.tenant, n.name, r.name, b.ulid, c.lsn, c.contents
		FROM conflict c JOIN run r ON r.id = c.run JOIN node n ON n.id = r.node JOIN branch b ON b.id = c.branch
		ORDER BY r.tenant, r.name, n.name, b.ulid, c.lsn LIMIT ?`, maxFindings)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		c := Finding{What: "conflict"}
		if err := rows.Scan(&c.Tenant, &c.Node, &c.Run, &c.Branch, &c.LSN, &c.Contents); err != nil {
			return err
		}
		v.Findings = append(v.Findings, c)
	}
	return rows.Err()
}
