package sqlite

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
)

// Fill says what a column holds in the rows that a table had before an upgrade: "table.column" → an SQL expression over
// the old row, with :wall and :up for the clocks of the moment, in microseconds. Other columns keep what they hold, and
// new ones get their default.
type Fill map[string]string

// FillClocks begins steady time in a file that had none: with recorded time.
var FillClocks = Fill{"meta.up_us": ":up", "meta.wall_us": ":wall", "meta.steady_us": "max(clock_us, :wall)"}

func with(a, b Fill) Fill {
	all := maps.Clone(a)
	maps.Copy(all, b)
	return all
}

// fills are the steps from one version to the schema's own, the later ones last; nil when one is missing.
func (s Schema) fills(version int) (list []Fill) {
	for v := version; v < s.Version; v++ {
		f, ok := s.Upgrades[v]
		if !ok || s.Text == "" {
			return nil
		}
		list = append(list, f)
	}
	return list
}

// object is a row of sqlite_master that somebody wrote.
type object struct{ kind, name, sql string }

func (o object) quoted() string { return `"` + strings.ReplaceAll(o.name, `"`, `""`) + `"` }

// upgrade brings an older file to the schema's own version in one transaction, or leaves it as it is; a second process
// that came first wins. The schema's text is the truth: each table whose own differs from it is made anew and takes over
// the rows; indexes, triggers and views are what the text has. A table that the text does not know stays. ErrLocked: a
// process runs on it, which can only be one of an older version.
func upgrade(ctx context.Context, abs string, schema Schema, o Options) error {
	want, err := fresh(ctx, schema.Text)
	if err != nil {
		return err
	}
	// A table that is made anew is dropped in its old form; with foreign keys on, that would delete what refers to it.
	db := openPool(dsn(abs, "rw", fmt.Sprintf("&_busy_timeout=%d&_journal_mode=WAL&_synchronous=FULL&_foreign_keys=off&_dqs=0", o.BusyTimeout.Milliseconds())), 1)
	defer db.Close()
	conn, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	up := upgrader{conn: conn, fault: o.fault}
	// The old way to rename leaves what speaks of the table alone, so that it comes to mean the new one.
	up.exec(ctx, "PRAGMA legacy_alter_table = ON")
	up.exec(ctx, "BEGIN IMMEDIATE")
	if up.err != nil {
		return up.err
	}
	var from int
	err = conn.QueryRowContext(ctx, "PRAGMA user_version").Scan(&from)
	letGo := func() error { return nil }
	if err == nil && from < schema.Version {
		letGo, err = keepOut(abs, schema.Locks)
	}
	if err == nil && from < schema.Version {
		wall, uptime := o.Clocks.read()
		moment := strings.NewReplacer(":wall", fmt.Sprint(wall), ":up", fmt.Sprint(uptime))
		fill := Fill{}
		for _, f := range schema.fills(from) {
			for column, value := range f {
				fill[column] = moment.Replace(value)
			}
		}
		err = up.reshape(ctx, want, fill)
		up.exec(ctx, fmt.Sprintf("PRAGMA user_version = %d", schema.Version))
		err = cmp.Or(err, up.err)
	}
	// Before the commit, and not after: who waits for it to open the file takes its own lock next. One of the older version
	// that begins here has to wait for it too, as if it had begun earlier.
	if err = errors.Join(err, letGo()); err != nil {
		_, rerr := conn.ExecContext(context.WithoutCancel(ctx), "ROLLBACK")
		return errors.Join(err, rerr)
	}
	up.exec(ctx, "COMMIT")
	if up.err == nil && from < schema.Version {
		o.Logger.Info("database upgraded", "component", "store", "file", abs, "from", from, "to", schema.Version)
	}
	return up.err
}

// keepOut holds the locks of a file's long-running processes until letGo, or fails with ErrLocked. Only who has the write
// lock may call it: two upgrades would take each other for such a process.
func keepOut(abs string, endings []string) (letGo func() error, err error) {
	var held []*Lock
	letGo = func() error {
		var errs []error
		for _, l := range held {
			errs = append(errs, l.Release())
		}
		return errors.Join(errs...)
	}
	for _, ending := range endings {
		l, err := TakeLock(abs+ending, fmt.Sprintf("%d, which upgrades the database", os.Getpid()))
		if err != nil {
			return letGo, err
		}
		held = append(held, l)
	}
	return letGo, nil
}

// fresh is what a new file of the schema has in it.
func fresh(ctx context.Context, text string) ([]object, error) {
	db := openPool("file::memory:?_dqs=0", 1)
	defer db.Close()
	conn, err := db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if _, err := conn.ExecContext(ctx, text); err != nil {
		return nil, err
	}
	return objects(ctx, conn)
}

// objects lists what is in a file, in the order in which it was made.
func objects(ctx context.Context, conn *sql.Conn) (list []object, err error) {
	rows, err := conn.QueryContext(ctx, "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY rowid")
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var o object
		if err := rows.Scan(&o.kind, &o.name, &o.sql); err != nil {
			return nil, err
		}
		list = append(list, o)
	}
	return list, rows.Err()
}

// upgrader runs statements until one fails.
type upgrader struct {
	conn  *sql.Conn
	fault func(point string) error
	err   error
}

func (u *upgrader) exec(ctx context.Context, statement string, args ...any) {
	if u.err != nil {
		return
	}
	if u.err = u.fault("upgrade"); u.err != nil {
		return
	}
	if _, err := u.conn.ExecContext(ctx, statement, args...); err != nil {
		u.err = fmt.Errorf("upgrade: %w", err)
	}
}

func (u *upgrader) reshape(ctx context.Context, want []object, fill Fill) error {
	have, err := objects(ctx, u.conn)
	if err != nil {
		return err
	}
	for _, o := range have {
		if o.kind != "table" && !slices.Contains(want, o) {
			u.exec(ctx, "DROP "+o.kind+" "+o.quoted())
		}
	}
	for _, o := range want {
		if o.kind != "table" || slices.Contains(have, o) {
			continue
		}
		if !slices.ContainsFunc(have, func(h object) bool { return h.kind == "table" && h.name == o.name }) {
			u.exec(ctx, o.sql)
			continue
		}
		if err := u.remake(ctx, o, fill); err != nil {
			return fmt.Errorf("upgrade table %s: %w", o.name, err)
		}
	}
	if u.err != nil {
		return u.err
	}
	if have, err = objects(ctx, u.conn); err != nil {
		return err
	}
	for _, o := range want { // the indexes of a table went with its old form
		if !slices.Contains(have, o) {
			u.exec(ctx, o.sql)
		}
	}
	if u.err != nil {
		return u.err
	}
	var table string
	err = u.conn.QueryRowContext(ctx, `SELECT "table" FROM pragma_foreign_key_check LIMIT 1`).Scan(&table)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	return cmp.Or(err, fmt.Errorf("upgrade: a row of %s refers to one that is missing", table))
}

// remake makes a table anew and moves the rows over. Ids that AUTOINCREMENT gave out stay given out.
func (u *upgrader) remake(ctx context.Context, table object, fill Fill) error {
	old := object{name: "old_" + table.name}
	u.exec(ctx, "ALTER TABLE "+table.quoted()+" RENAME TO "+old.quoted())
	u.exec(ctx, table.sql)
	if u.err != nil {
		return u.err
	}
	had, err := u.columns(ctx, old.name)
	if err != nil {
		return err
	}
	has, err := u.columns(ctx, table.name)
	if err != nil {
		return err
	}
	var names, values []string
	for _, c := range has {
		switch value, ok := fill[table.name+"."+c]; {
		case ok:
			values = append(values, value)
		case slices.Contains(had, c):
			values = append(values, c)
		default:
			continue
		}
		names = append(names, c)
	}
	u.exec(ctx, "INSERT INTO "+table.quoted()+" ("+strings.Join(names, ", ")+") SELECT "+strings.Join(values, ", ")+" FROM "+old.quoted())
	if strings.Contains(table.sql, "AUTOINCREMENT") {
		u.exec(ctx, "DELETE FROM sqlite_sequence WHERE name = ?", table.name)
		u.exec(ctx, "UPDATE sqlite_sequence SET name = ? WHERE name = ?", table.name, old.name)
	}
	u.exec(ctx, "DROP TABLE "+old.quoted())
	return u.err
}

func (u *upgrader) columns(ctx context.Context, table string) (list []string, err error) {
	rows, err := u.conn.QueryContext(ctx, "SELECT name FROM pragma_table_info(?) ORDER BY cid", table)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			return nil, err
		}
		list = append(list, name)
	}
	return list, rows.Err()
}
