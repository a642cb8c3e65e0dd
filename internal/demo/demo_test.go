package demo

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// small is a demo of a second.
func small(t testing.TB, out io.Writer) Options {
	t.Helper()
	schema, err := os.ReadFile("../../schema.sql")
	if err != nil {
		t.Fatal(err)
	}
	return Options{Schema: string(schema), Out: out, Runs: 4, Inputs: 160, Feed: time.Millisecond, Drain: time.Millisecond}
}

// inFolder has the demo make its folder in one that is empty.
func inFolder(t *testing.T) (left func() []string) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	return func() []string {
		list, err := filepath.Glob(filepath.Join(dir, "*", "*"))
		if err != nil {
			t.Fatal(err)
		}
		return list
	}
}

func openDB(t testing.TB, path string) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

func count(t testing.TB, path, query string) (n int64) {
	t.Helper()
	if err := openDB(t, path).QueryRow(query).Scan(&n); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return n
}

// shown reads the table at the end.
func shown(t testing.TB, out, name string) int64 {
	t.Helper()
	m := regexp.MustCompile(`(?m)^ +` + name + ` +([0-9,]+)( |$)`).FindStringSubmatch(out)
	if m == nil {
		t.Fatalf("no %q in:\n%s", name, out)
	}
	return number(t, m[1])
}

func number(t testing.TB, digits string) int64 {
	t.Helper()
	n, err := strconv.ParseInt(strings.ReplaceAll(digits, ",", ""), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestFiguresAreThoseOfTheDatabases(t *testing.T) {
	left := inFolder(t)
	var out bytes.Buffer
	o := small(t, &out)
	want := map[string]int64{"out of order": 0, "escaped": 0, "lost": 0}
	o.beforeAudit = func(db, foldDB string) error {
		want["records committed"] = count(t, db, "SELECT count(*) FROM outbox")
		want["withheld"] = count(t, db, "SELECT sum(head_lsn - max(exportable, shipped)) FROM branch")
		want["undone"] = count(t, foldDB, "SELECT count(*) FROM abandoned")
		want["folded exactly once"] = count(t, foldDB, "SELECT count(*) FROM line")
		want["duplicates among them"] = count(t, foldDB, "SELECT duplicates FROM meta")
		want["deliveries"] = count(t, foldDB, "SELECT count(*) FROM record") + want["duplicates among them"]
		return nil
	}
	if err := Run(t.Context(), o); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	for name, n := range want {
		if got := shown(t, out.String(), name); got != n {
			t.Errorf("%s: shown %d, the databases say %d", name, got, n)
		}
	}
	f := func(name string) int64 { return shown(t, out.String(), name) }
	if f("records committed") < 4*least || f("duplicates among them") == 0 || f("withheld") == 0 || f("undone") == 0 {
		t.Errorf("it shows nothing:\n%s", &out)
	}
	if f("records committed") != f("folded exactly once")+f("withheld")+f("undone") || f("deliveries") != f("folded exactly once")+f("undone")+f("duplicates among them") {
		t.Errorf("it does not add up:\n%s", &out)
	}
	// What was said when the run was rewound is what the table says at the end; one record may have been on its way.
	m := regexp.MustCompile(`Of the steps undone, ([0-9,]+) records had been shipped. The other ([0-9,]+) must not follow`).
		FindStringSubmatch(strings.Join(strings.Fields(out.String()), " "))
	if m == nil {
		t.Fatalf("no rewind:\n%s", &out)
	}
	if passed := f("undone") - number(t, m[1]); passed < 0 || passed > 1 || f("withheld") != number(t, m[2])-passed {
		t.Errorf("said: %s. shown: %d undone, %d withheld", m[0], f("undone"), f("withheld"))
	}
	for _, text := range []string{"1  The broker is down", "2  The broker is back", "PUBACKs are lost", "The relay panics", " is rewound to step ",
		"100%", "The promise holds", "What to try next", "postrider dev"} {
		if !strings.Contains(out.String(), text) {
			t.Errorf("no %q in:\n%s", text, &out)
		}
	}
	if n := regexp.MustCompile(`(?m)^ +committed +pending +shipped +folded$`).FindAllString(out.String(), -1); len(n) != 2 {
		t.Errorf("%d headers of figures:\n%s", len(n), &out)
	}
	// While the broker is down everything is pending, and nothing arrives.
	down := regexp.MustCompile(`(?m)^   broker down +([0-9,]+) +([0-9,]+) +([0-9,]+) +([0-9,]+)$`).FindAllStringSubmatch(out.String(), -1)
	if len(down) == 0 || down[len(down)-1][1] == "0" {
		t.Errorf("nothing was committed while the broker was down:\n%s", &out)
	}
	for _, m := range down {
		if m[1] != m[2] || m[3] != "0" || m[4] != "0" {
			t.Errorf("the broker is down, and yet: %s", m[0])
		}
	}
	if strings.ContainsAny(out.String(), "\x1b\r") {
		t.Errorf("a control sequence where there is no terminal: %q", &out)
	}
	for line := range strings.Lines(out.String()) {
		if len(line) > usualWidth {
			t.Errorf("%d columns: %q", len(line)-1, line)
		}
	}
	if l := left(); len(l) != 0 {
		t.Errorf("left behind: %v", l)
	}
}

func TestJSONIsTheFiguresAlone(t *testing.T) {
	left := inFolder(t)
	var out bytes.Buffer
	o := small(t, &out)
	o.JSON, o.Keep = true, true
	if err := Run(t.Context(), o); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	var f Figures
	d := json.NewDecoder(&out)
	d.DisallowUnknownFields()
	if err := errors.Join(d.Decode(&f)); err != nil || d.More() {
		t.Fatalf("%v, %q", err, &out)
	}
	if !f.Holds || f.Runs != 4 || f.Committed == 0 || f.Committed != f.Folded+f.Withheld+f.Undone || f.Lost != 0 {
		t.Errorf("%+v", f)
	}
	for _, file := range []string{"demo.db", "demo.fold.db"} {
		if _, err := os.Stat(filepath.Join(f.Folder, file)); err != nil || len(left()) == 0 {
			t.Errorf("not kept: %v", err)
		}
	}
}

// record is one that the runs' history has, from the middle of a branch, and the newest of its branch.
const (
	middle = `(SELECT r.id FROM record r JOIN lineage c ON c.branch = r.branch AND r.lsn > c.lo AND r.lsn <= c.hi WHERE r.lsn = 5 AND r.type = 'counted' ORDER BY r.id LIMIT 1)`
	newest = `(SELECT r.id FROM record r JOIN live l ON l.branch = r.branch ORDER BY r.lsn DESC LIMIT 1)`
)

// fourth is the checkpoint of a step at the node.
const fourth = `(SELECT id FROM checkpoint WHERE step = 4 ORDER BY id LIMIT 1)`

// newestOfRun1 is in either database the record that run-1 ends with; live is how the run names its live branch there.
func newestOfRun1(table, live string) string {
	return fmt.Sprintf(`WHERE id = (SELECT o.id FROM %s o WHERE o.branch = (SELECT %s FROM run WHERE name = 'run-1') ORDER BY o.lsn DESC LIMIT 1)`, table, live)
}

func TestAuditFindsWhatIsWrong(t *testing.T) {
	inFolder(t)
	dir := t.TempDir()
	o := small(t, io.Discard)
	o.beforeAudit = func(db, foldDB string) error {
		return errors.Join(os.Rename(db, filepath.Join(dir, "n.db")), os.Rename(foldDB, filepath.Join(dir, "f.db")))
	}
	if err := Run(t.Context(), o); err == nil {
		t.Fatal("there are no databases, and no error")
	}
	copyAs := func(from, to string) {
		b, err := os.ReadFile(filepath.Join(dir, from))
		if err == nil {
			err = os.WriteFile(to, b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	const column = "branch, prevlsn, shown, mark, step, occurred_us, recorded_us, arrived_us, type, subject, correlation, causation, trace, data"
	for _, c := range []struct {
		name       string
		node, fold string // what is done to the databases
		want       error
		says       string // all of these words
		lost, late int64
	}{
		{name: "nothing"},
		{name: "a record is missing", fold: "DELETE FROM record WHERE id = " + middle, want: ErrBroken, says: `record 5 of run-\d \(branch \w{26}\) is lost; .*the fold finds a gap in run-`, lost: 1},
		{name: "a tail is missing", fold: "DELETE FROM record WHERE id = " + newest, want: ErrBroken, says: `record \d+ of run-\d .* is lost`, lost: 1},
		{name: "a byte is another", fold: `UPDATE record SET data = CAST(replace(CAST(data AS TEXT), '4', '5') AS BLOB) WHERE id = ` + middle, want: ErrBroken,
			says: `record 5 of run-\d .* came as counted "{\\"n\\":5}" and was counted "{\\"n\\":4}"`, lost: 1},
		{name: "a type is another", fold: `UPDATE record SET type = 'other' WHERE id = ` + middle, want: ErrBroken, says: "came as other", lost: 1},
		{name: "two arrive the wrong way round", fold: `UPDATE record SET id = -1 WHERE id = ` + middle, want: ErrBroken, says: `record 1 of run-\d .* arrived after record 5`, late: 4},
		{name: "one was never committed", fold: `INSERT INTO record (lsn, ` + column + `) SELECT lsn + 1, branch, lsn, ` + strings.TrimPrefix(column, "branch, prevlsn, ") + ` FROM record WHERE id = ` + newest,
			want: ErrBroken, says: `the fold holds record \d+ of run-\d .*, which was never committed`},
		{name: "one has two contents", fold: `INSERT INTO record (lsn, ` + column + `) SELECT lsn, branch, prevlsn, 0, ` + strings.TrimPrefix(column, "branch, prevlsn, shown, ") + ` FROM record WHERE id = ` + newest,
			want: ErrBroken, says: `the fold finds a conflict in run-`},
		{name: "one is no event", fold: `INSERT INTO malformed (topic, reason, at_us, size, payload) VALUES ('t', 'r', 0, 0, x'')`, want: ErrBroken, says: "1 set aside as malformed"},
		{name: "the node commits more", node: `INSERT INTO outbox (branch, lsn, step, kind, prevlsn, bytes, occurred_us, recorded_us, type, data)
			SELECT id, head_lsn + 1, 1, 1, head_lsn, 0, 0, 0, 'x', x'00' FROM branch WHERE head_lsn = shipped LIMIT 1`, want: ErrBroken, says: `the outbox has \d+ records and counts \d+`},
		{name: "one is pending", node: `UPDATE branch SET shipped = shipped - 1 WHERE id = (SELECT live FROM run LIMIT 1)`, want: ErrBroken, says: "1 records are still pending"},
		{name: "a rewind did not happen", node: `UPDATE branch SET exportable = shipped WHERE exportable < shipped`, want: ErrBroken,
			says: `record \d+ of run-\d .*: on the live lineage for the node true, for the fold false`},
		{name: "what was withheld counts as shipped", node: `UPDATE branch SET shipped = head_lsn WHERE exportable < shipped`, want: ErrBroken, says: " is lost", lost: -1},
		{name: "one was sent after the rewind", node: `UPDATE branch SET opened_us = 0 WHERE parent IS NOT NULL`, want: ErrBroken,
			says: `record \d+ of run-\d \(branch \w{26}\) was sent after the rewind that took it back; .* and \d+ more`},
		{name: "the node lacks one", node: `DELETE FROM outbox WHERE id = (SELECT id FROM outbox WHERE lsn = 5 LIMIT 1)`, want: ErrBroken,
			says: `record 6 of run-\d \(branch \w{26}\) comes next after record 4; run-\d \(branch \w{26}\) has \d+ records and counts \d+`},
		{name: "the node lacks the last ones", node: `UPDATE branch SET head_lsn = head_lsn + 1 WHERE id = (SELECT live FROM run WHERE name = 'run-2')`, want: ErrBroken,
			says: `run-2 \(branch \w{26}\) has \d+ records and counts \d+`},
		{name: "a step left no record", node: `UPDATE checkpoint SET lsn = lsn - 1 WHERE id = ` + fourth, want: ErrBroken, says: `^\S.*: step 4 of run-\d \(branch \w{26}\) has no record$`},
		{name: "a step consumed nothing", node: `UPDATE checkpoint SET input = NULL WHERE id = ` + fourth, want: ErrBroken,
			says: `step 4 of run-\d \(branch \w{26}\) consumed no input; input \w+ of run-\d was consumed by no step; its row says step 4$`},
		{name: "an input is taken twice", node: `UPDATE checkpoint SET input = (SELECT input FROM checkpoint p WHERE p.id = checkpoint.prev_id) WHERE id = ` + fourth, want: ErrBroken,
			says: `input \w+ of run-\d was consumed by step 3 and step 4; its row says step 3; input \w+ of run-\d was consumed by no step; its row says step 4$`},
		{name: "an input is left", node: `UPDATE inbox SET consumed_branch = NULL, consumed_step = NULL WHERE id = 3`, want: ErrBroken,
			says: `input \w+ of run-\d was consumed by step \d+; its row says none$`},
		{name: "an input is gone", node: `DELETE FROM inbox WHERE id = 3`, want: ErrBroken, says: `step \d+ of run-\d \(branch \w{26}\) consumed no input; \d+ inputs were accepted, and \d+ of them are there$`},
		{name: "the counter slips", node: `UPDATE outbox SET data = CAST('{"n":7000}' AS BLOB) ` + newestOfRun1("outbox", "live"),
			fold: `UPDATE record SET data = CAST('{"n":7000}' AS BLOB) ` + newestOfRun1("record", "(SELECT branch FROM live WHERE live.run = run.id)"), want: ErrBroken,
			says: `record \d+ of run-1 \(branch \w{26}\) says "{\\"n\\":7000}" and not "{\\"n\\":\d+}"; the fold counts to 7000 in run-1, which has \d+ steps$`},
		{name: "a run has fewer steps", node: `UPDATE branch SET head_step = head_step - 1 WHERE id = (SELECT live FROM run WHERE name = 'run-1')`, want: ErrBroken,
			says: `the fold counts to \d+ in run-1, which has \d+ steps$`},
		{name: "no duplicate", fold: "UPDATE meta SET duplicates = 0", want: ErrProvedNothing, says: "there was no duplicate"},
	} {
		t.Run(c.name, func(t *testing.T) {
			db, foldDB := filepath.Join(t.TempDir(), "n.db"), filepath.Join(t.TempDir(), "f.db")
			copyAs("n.db", db)
			copyAs("f.db", foldDB)
			for path, statement := range map[string]string{db: c.node, foldDB: c.fold} {
				if statement == "" {
					continue
				}
				res, err := openDB(t, path).Exec(statement)
				if err != nil {
					t.Fatal(err)
				}
				if n, err := res.RowsAffected(); err != nil || n != 1 {
					t.Fatalf("%d rows changed, %v", n, err)
				}
			}
			f, err := audit(t.Context(), o.filled(), db, foldDB)
			if err != nil {
				t.Fatal(err)
			}
			got := f.verdict()
			if !errors.Is(got, c.want) || f.Holds != (c.want == nil) {
				t.Fatalf("%v, not %v", got, c.want)
			}
			if c.want != nil && !regexp.MustCompile(c.says).MatchString(got.Error()) {
				t.Errorf("%q does not say %q", got, c.says)
			}
			if c.lost < 0 {
				c.lost = f.Lost
			}
			if f.Lost != c.lost || f.OutOfOrder != c.late {
				t.Errorf("%d lost, %d out of order; not %d and %d", f.Lost, f.OutOfOrder, c.lost, c.late)
			}
			if strings.Contains(fmt.Sprint(got), "\n") {
				t.Errorf("more than a line: %q", got)
			}
		})
	}
}

// The databases decide, not what the demo has seen.
func TestABrokenPromiseIsAnError(t *testing.T) {
	left := inFolder(t)
	var out bytes.Buffer
	o := small(t, &out)
	o.beforeAudit = func(_, foldDB string) error {
		_, err := openDB(t, foldDB).Exec("DELETE FROM record WHERE id = " + newest)
		return err
	}
	err := Run(t.Context(), o)
	if !errors.Is(err, ErrBroken) || !strings.Contains(err.Error(), "is lost") {
		t.Errorf("%v", err)
	}
	if shown(t, out.String(), "lost") != 1 || !strings.Contains(out.String(), "The promise does not hold.") || strings.Contains(out.String(), "The promise holds") ||
		strings.Contains(out.String(), "What to try next") {
		t.Errorf("it says:\n%s", &out)
	}
	if l := left(); len(l) != 0 {
		t.Errorf("left behind: %v", l)
	}
}

// trigger cancels when a text has been written.
type trigger struct {
	b      bytes.Buffer
	text   string
	cancel func()
}

func (w *trigger) Write(p []byte) (int, error) {
	w.b.Write(p)
	if strings.Contains(w.b.String(), w.text) {
		w.cancel()
	}
	return len(p), nil
}

func TestToldToEndItLeavesNothing(t *testing.T) {
	for _, at := range []string{"A node", "broker down", "The broker is back", "The relay panics", "What the two databases say"} {
		t.Run(at, func(t *testing.T) {
			left := inFolder(t)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			out := &trigger{text: at, cancel: cancel}
			if err := Run(ctx, small(t, out)); !errors.Is(err, context.Canceled) {
				t.Errorf("%v", err)
			}
			if strings.Contains(out.b.String(), "records committed") || strings.Contains(out.b.String(), "promise") {
				t.Errorf("it pretends to have come to its end:\n%s", &out.b)
			}
			if l := left(); len(l) != 0 {
				t.Errorf("left behind: %v", l)
			}
		})
	}
}

func TestWhatDoesNotHappenIsNotWaitedForForEver(t *testing.T) {
	left := inFolder(t)
	o := small(t, io.Discard)
	o.Drain, o.patience = time.Hour, 300*time.Millisecond
	err := Run(t.Context(), o)
	if err == nil || !strings.HasPrefix(err.Error(), "waited 300ms in vain until ") {
		t.Errorf("%v", err)
	}
	if l := left(); len(l) != 0 {
		t.Errorf("left behind: %v", l)
	}
}

// brokenPipe takes the first bytes only.
type brokenPipe struct{ n int }

func (b *brokenPipe) Write(p []byte) (int, error) {
	if b.n -= len(p); b.n < 0 {
		return 0, io.ErrClosedPipe
	}
	return len(p), nil
}

func TestWhatCannotBeShownIsAnError(t *testing.T) {
	inFolder(t)
	if err := Run(t.Context(), small(t, &brokenPipe{100})); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("%v", err)
	}
}

func TestAPartThatEndsByItselfEndsTheDemo(t *testing.T) {
	failed := make(chan error, 1)
	p := &parts{fail: func(err error) { failed <- err }}
	own := errors.New("disk is gone")
	p.start("executor", func(context.Context) error { return own })
	if err := <-failed; !errors.Is(err, own) || !strings.Contains(err.Error(), "the executor ended by itself") {
		t.Errorf("%v", err)
	}
	p.start("relay", func(ctx context.Context) error { <-ctx.Done(); return nil })
	if err := p.close(); !errors.Is(err, own) {
		t.Errorf("%v", err)
	}
	select {
	case err := <-failed:
		t.Errorf("told to end, and yet: %v", err)
	default:
	}
}
