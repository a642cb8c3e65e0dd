package fold

import (
	"fmt"
	"strings"
	"testing"
)

// dump is everything that is stored and derived, in an order of its own, but for row ids, times of arrival and the
// counter of duplicates: those are all that may depend on how the records came.
func dump(t testing.TB, f *Fold) string {
	t.Helper()
	return dumpOf(t, f)
}

func dumpOf(t interface {
	Fatal(...any)
	Fatalf(string, ...any)
}, f *Fold) string {
	var b strings.Builder
	for _, q := range []string{
		"SELECT name, epoch, cursor_epoch, cursor_seq FROM node ORDER BY 1",
		"SELECT r.tenant, r.name, n.name FROM run r JOIN node n ON n.id = r.node ORDER BY 1, 2, 3",
		`SELECT n.name, r.tenant, r.name, b.ulid, b.epoch, b.gen, b.known, p.ulid, b.fork_step, b.fork_lsn, b.opened_lsn, hex(b.opened_hash)
			FROM branch b JOIN run r ON r.id = b.run JOIN node n ON n.id = r.node LEFT JOIN branch p ON p.id = b.parent ORDER BY 1, 2, 3, 4`,
		`SELECT n.name, r.tenant, r.name, b.ulid, e.lsn, e.shown, e.mark, e.prevlsn, e.step, e.occurred_us, e.recorded_us, e.type, e.subject, CAST(e.data AS TEXT)
			FROM record e JOIN branch b ON b.id = e.branch JOIN run r ON r.id = b.run JOIN node n ON n.id = r.node
			ORDER BY 1, 2, 3, 4, 5, 6, 8, 12, 14`,
		`SELECT 'live', n.name, r.tenant, r.name, b.ulid FROM live v JOIN run r ON r.id = v.run JOIN node n ON n.id = r.node
			LEFT JOIN branch b ON b.id = v.branch ORDER BY 2, 3, 4`,
		`SELECT 'lineage', n.name, r.tenant, r.name, h.ulid, b.ulid, c.lo, c.hi FROM lineage c JOIN run r ON r.id = c.run
			JOIN node n ON n.id = r.node JOIN branch h ON h.id = c.head JOIN branch b ON b.id = c.branch ORDER BY 2, 3, 4, 5, 7, 8`,
		`SELECT 'gap', n.name, r.tenant, r.name, h.ulid, b.ulid, g.after, g.missing, g.next FROM gap g JOIN run r ON r.id = g.run
			JOIN node n ON n.id = r.node JOIN branch h ON h.id = g.head JOIN branch b ON b.id = g.branch ORDER BY 2, 3, 4, 5, 7`,
		`SELECT 'parked', n.name, r.tenant, r.name, b.ulid, p.lsn FROM parked p JOIN run r ON r.id = p.run
			JOIN node n ON n.id = r.node JOIN branch b ON b.id = p.branch ORDER BY 2, 3, 4, 5, 6`,
		`SELECT 'abandoned', n.name, r.tenant, r.name, b.ulid, p.lsn FROM abandoned p JOIN run r ON r.id = p.run
			JOIN node n ON n.id = r.node JOIN branch b ON b.id = p.branch ORDER BY 2, 3, 4, 5, 6`,
		`SELECT 'conflict', n.name, r.tenant, r.name, b.ulid, p.lsn, p.contents FROM conflict p JOIN run r ON r.id = p.run
			JOIN node n ON n.id = r.node JOIN branch b ON b.id = p.branch ORDER BY 2, 3, 4, 5, 6`,
	} {
		rows, err := f.store.Reader().Query(q)
		if err != nil {
			t.Fatalf("%s: %v", q, err)
		}
		names, err := rows.Columns()
		if err != nil {
			t.Fatal(err)
		}
		row, into := make([]any, len(names)), make([]any, len(names))
		for i := range row {
			into[i] = &row[i]
		}
		for rows.Next() {
			if err := rows.Scan(into...); err != nil {
				t.Fatal(err)
			}
			fmt.Fprintln(&b, row...)
		}
		if err := rows.Err(); err != nil {
			t.Fatal(err)
		}
		rows.Close()
	}
	return b.String()
}
