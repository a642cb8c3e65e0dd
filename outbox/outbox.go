// Package outbox is the durable queue between executor and relay. Append writes a step's records inside the step's own
// transaction; Drain hands out what is pending without removing it, ascending by LSN within a branch, branches and
// tenants in turn, a parent's kept prefix before its child; Ack moves a branch's shipped mark once the broker has
// confirmed. A record is pending while shipped < LSN ≤ exportable of its branch; a rewind lowers exportable, and
// what lies beyond is withheld. Every write of a relay names the fence of its lease and changes nothing under a newer
// one.
package outbox

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	"postrider/internal/record"
	"postrider/internal/sqlite"
)

// ErrFenced: a newer lease exists; nothing was changed.
var ErrFenced = errors.New("a newer relay holds the lease")

// ErrLocked: another relay of this database runs; the message names it.
var ErrLocked = sqlite.ErrLocked

// Exclude keeps every other relay of this database away until release is called, or this process ends, however it ends:
// an OS lock on a file beside the database. holder names this process to the others. ErrLocked: another one has it.
func (o *Outbox) Exclude(holder string) (release func() error, err error) {
	lock, err := sqlite.TakeLock(o.store.Path()+".relay", holder)
	if err != nil {
		return nil, err
	}
	return lock.Release, nil
}

// Outbox reads and writes the outbox tables of one database. It is safe for concurrent use.
type Outbox struct {
	store *sqlite.Store
	node  string
}

// New returns the outbox of node's database.
func New(store *sqlite.Store, node string) *Outbox { return &Outbox{store: store, node: node} }

// Head is the end of a branch: where the next record goes.
type Head struct {
	Branch   int64 // row id
	LSN      int64
	EventLSN int64 // last event of the lineage
	TailID   int64 // row id of the record at LSN
	Bytes    int64 // cumulative size of the branch's records
}

// One statement per kind: each bound value has its price, and most records are events.
const (
	insertColumns = `INSERT INTO outbox (prev_id, branch, lsn, step, kind, prevlsn, bytes, occurred_us, recorded_us, type,
		subject, correlation, causation, trace, data`
	insertValues  = "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?"
	eventInsert   = insertColumns + ") " + insertValues + ")"
	commandInsert = insertColumns + ", to_node, to_agent, to_run, input_id, hops, expires_us) " + insertValues + ", ?, ?, ?, ?, ?, ?)"
	messageInsert = insertColumns + ", topic, retain, expires_us) " + insertValues + ", ?, ?, ?)"
)

// Append writes records after head, in order, with dense LSNs, and returns the new head. It belongs to the transaction
// of the step that made them: the caller moves the branch's head to the returned one in the same transaction. From each
// record it takes Kind, Type, Subject, Data, times, correlation, destination and expiry (in steady time); LSN and PrevLSN are given here.
func Append(ctx context.Context, tx *sqlite.Tx, head Head, step int64, records []record.Record) (Head, error) {
	for i := range records {
		r := &records[i]
		var prev any
		if head.TailID != 0 {
			prev = head.TailID
		}
		r.LSN, r.PrevLSN, r.Step, r.Recorded = head.LSN+1, head.EventLSN, step, tx.NowUS
		data := r.Data
		if data == nil {
			data = []byte{} // a nil slice would bind NULL
		}
		head.Bytes += size(r)
		query, args := eventInsert, []any{prev, head.Branch, r.LSN, step, int64(r.Kind), r.PrevLSN, head.Bytes, r.Occurred, r.Recorded, r.Type,
			text(r.Subject), text(r.Correlation), text(r.Causation), text(r.Trace), data}
		switch r.Kind {
		case record.Command:
			query, args = commandInsert, append(args, r.ToNode, r.ToAgent, r.ToRun, r.InputID, r.Hops, number(r.Expires))
		case record.Message:
			query, args = messageInsert, append(args, r.Topic, r.Retain, number(r.Expires))
		}
		_, id, err := tx.Exec(ctx, query, args...)
		if err != nil {
			return Head{}, fmt.Errorf("append record %d: %w", r.LSN, err)
		}
		head.LSN, head.TailID = r.LSN, id
		if r.Kind == record.Event {
			head.EventLSN = r.LSN
		}
	}
	return head, nil
}

// Creator is the step of this node that created an input which was handed over; Branch 0: none did.
type Creator struct{ Branch, Step int64 }

// SetCreator notes who created the input that the record at row id hands over, so that WithholdCreated finds it.
func SetCreator(ctx context.Context, tx *sqlite.Tx, id int64, c Creator) error {
	if c.Branch == 0 {
		return nil
	}
	_, _, err := tx.Exec(ctx, "UPDATE outbox SET creator_branch = ?, creator_step = ? WHERE id = ?", c.Branch, c.Step, id)
	if err != nil {
		return fmt.Errorf("note who created record %d: %w", id, err)
	}
	return nil
}

// WithholdCreated withholds the handed-over inputs that steps (from, to] of a branch created and that were not shipped;
// shipped counts the others. They stay in their branch, and the relay passes over them.
func WithholdCreated(ctx context.Context, tx *sqlite.Tx, branch, from, to int64) (withheld, shipped int64, err error) {
	err = tx.Get(ctx, `SELECT count(*) FROM outbox o JOIN branch b ON b.id = o.branch WHERE o.creator_branch = ? AND o.creator_step > ?
		AND o.creator_step <= ? AND o.withheld_us IS NULL AND o.lsn <= b.shipped`, []any{branch, from, to}, &shipped)
	if err == nil {
		withheld, _, err = tx.Exec(ctx, `UPDATE outbox SET withheld_us = ? WHERE creator_branch = ? AND creator_step > ? AND creator_step <= ? AND withheld_us IS NULL
			AND lsn > (SELECT shipped FROM branch WHERE id = outbox.branch)`, tx.NowUS, branch, from, to)
	}
	if err != nil {
		return 0, 0, fmt.Errorf("withhold handed-over inputs: %w", err)
	}
	return withheld, shipped, nil
}

// size is what a record counts in backlog bytes: what its maker chose, without the envelope.
func size(r *record.Record) int64 {
	return int64(len(r.Data) + len(r.Type) + len(r.Subject) + len(r.Topic))
}

func text(s string) any {
	if s == "" {
		return nil
	}
	return s
}

func number(n int64) any {
	if n == 0 {
		return nil
	}
	return n
}

// Shipped says that every record of a branch up to LSN has its PUBACK, or had expired.
type Shipped struct {
	Branch   int64 // row id
	LSN      int64
	Bytes    int64   // Item.Bytes of that record
	Recorded int64   // its recorded time
	Expired  []int64 // LSNs among them that were too late to send and have none
}

// Ack moves the shipped marks, one update per branch, in one transaction, and logs what was shipped. A mark never moves
// back. LSNs beyond exportable are accepted: a rewind may have come after the record was on its way. Returns ErrFenced,
// with nothing changed, when fence is not the newest.
func (o *Outbox) Ack(ctx context.Context, fence int64, shipped []Shipped) error {
	return o.store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) error {
		for _, s := range shipped {
			n, _, err := tx.Exec(ctx, `UPDATE branch SET shipped = ?1, shipped_bytes = ?2, shipped_us = ?3,
				deliveries = 0, attempts = 0, attempt_us = NULL, hold_us = NULL, last_error = NULL
				WHERE id = ?4 AND shipped < ?1 AND ?1 <= head_lsn AND EXISTS (SELECT 1 FROM relay_lease WHERE fence = ?5)`,
				s.LSN, s.Bytes, s.Recorded, s.Branch, fence)
			if err != nil {
				return fmt.Errorf("acknowledge branch %d up to %d: %w", s.Branch, s.LSN, err)
			}
			if n == 0 {
				if err := held(ctx, tx, fence); err != nil {
					return err
				}
				continue // shipped before
			}
			for _, lsn := range s.Expired {
				_, _, err := tx.Exec(ctx, "INSERT INTO dead (branch, lsn, reason, attempts, first_us, last_us) VALUES (?, ?, 'expired', 0, ?, ?)",
					s.Branch, lsn, tx.NowUS, tx.NowUS)
				if err != nil {
					return fmt.Errorf("record that record %d of branch %d expired: %w", lsn, s.Branch, err)
				}
			}
			if _, _, err := tx.Exec(ctx, "INSERT INTO ship_log (branch, upto, at_us) VALUES (?, ?, ?)", s.Branch, s.LSN, tx.NowUS); err != nil {
				return fmt.Errorf("log shipment of branch %d: %w", s.Branch, err)
			}
		}
		return nil
	})
}

func held(ctx context.Context, tx *sqlite.Tx, fence int64) error {
	var newest int64
	if err := tx.Get(ctx, "SELECT fence FROM relay_lease WHERE id = 1", nil, &newest); err != nil {
		return fmt.Errorf("read lease: %w", err)
	}
	if newest != fence {
		return ErrFenced
	}
	return nil
}

// Lease makes the caller the one relay that may write and returns its fence. Its commit is the barrier of a relay
// session: what Drain returns after it is durable, also what a process killed inside its fsync left behind.
func (o *Outbox) Lease(ctx context.Context, holder string) (fence int64, err error) {
	err = o.store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) error {
		return tx.Get(ctx, `INSERT INTO relay_lease (id, fence, holder, since_us) VALUES (1, 1, ?1, ?2)
			ON CONFLICT (id) DO UPDATE SET fence = fence + 1, holder = ?1, since_us = ?2 RETURNING fence`,
			[]any{holder, tx.NowUS}, &fence)
	})
	if err != nil {
		return 0, fmt.Errorf("take lease: %w", err)
	}
	return fence, nil
}

// Failed records that a session ended with cause while records of these branches were on their way, and when the next
// is tried. Nothing is held against a record: an outage is not an attempt.
func (o *Outbox) Failed(ctx context.Context, fence int64, branches []int64, cause string, next time.Time) error {
	return o.store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) error {
		n, _, err := tx.Exec(ctx, "UPDATE relay_lease SET last_error = ?, next_us = ? WHERE id = 1 AND fence = ?", cause, next.UnixMicro(), fence)
		if err != nil {
			return fmt.Errorf("record failure of the session: %w", err)
		}
		if n == 0 {
			return ErrFenced
		}
		for _, b := range branches {
			_, _, err := tx.Exec(ctx, `UPDATE branch SET deliveries = deliveries + 1, attempt_us = ?, last_error = ?
				WHERE id = ? AND shipped < exportable`, tx.NowUS, cause, b)
			if err != nil {
				return fmt.Errorf("record failed delivery of branch %d: %w", b, err)
			}
		}
		return nil
	})
}

// Connected clears what Failed left on the lease.
func (o *Outbox) Connected(ctx context.Context, fence int64) error {
	return o.store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) error {
		n, _, err := tx.Exec(ctx, "UPDATE relay_lease SET last_error = NULL, next_us = NULL WHERE id = 1 AND fence = ?", fence)
		if err == nil && n == 0 {
			err = ErrFenced
		}
		return err
	})
}

// Expired says whether a record that Drain gave is too late to be sent. It is decided when it would be published.
func (o *Outbox) Expired(r *record.Record) bool {
	return r.Expires != 0 && r.Expires <= o.store.Wall(o.store.SteadyUS())
}

// Watch tells a relay, before each of its writes, whether a rewind has passed. It holds one reading connection.
type Watch struct {
	conn        *sql.Conn
	version     driver.Stmt // of conn; by itself, since database/sql around it takes a third of the time
	rewinds     *sql.Stmt
	lastVersion int64
	lastRewinds int64
}

// Watch starts watching; the first call of Rewound counts from here.
func (o *Outbox) Watch(ctx context.Context) (*Watch, error) {
	conn, err := o.store.Reader().Conn(ctx)
	if err != nil {
		return nil, fmt.Errorf("watch for rewinds: %w", err)
	}
	w := &Watch{conn: conn}
	err = conn.Raw(func(c any) (err error) {
		w.version, err = c.(driver.ConnPrepareContext).PrepareContext(ctx, "PRAGMA data_version")
		return err
	})
	if err == nil {
		if w.rewinds, err = conn.PrepareContext(ctx, "SELECT rewinds FROM meta WHERE id = 1"); err == nil {
			_, err = w.Rewound(ctx)
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("watch for rewinds: %w", err), w.Close())
	}
	return w, nil
}

// Rewound reports whether a rewind was committed since the last call, by any process. It costs microseconds when
// nothing at all was committed. The end of ctx does not cut it short: to watch for that, the driver would start a
// goroutine, for every record that is sent.
func (w *Watch) Rewound(ctx context.Context) (bool, error) {
	ctx = context.WithoutCancel(ctx)
	version, err := w.dataVersion(ctx)
	if err != nil {
		return false, fmt.Errorf("read data version: %w", err)
	}
	if version == w.lastVersion {
		return false, nil
	}
	var rewinds int64
	if err := w.rewinds.QueryRowContext(ctx).Scan(&rewinds); err != nil {
		return false, fmt.Errorf("read rewind counter: %w", err)
	}
	moved := rewinds != w.lastRewinds
	w.lastVersion, w.lastRewinds = version, rewinds
	return moved, nil
}

func (w *Watch) dataVersion(ctx context.Context) (version int64, err error) {
	var row [1]driver.Value
	err = w.conn.Raw(func(any) error {
		rows, err := w.version.(driver.StmtQueryContext).QueryContext(ctx, nil)
		if err != nil {
			return err
		}
		return errors.Join(rows.Next(row[:]), rows.Close())
	})
	if err != nil {
		return 0, err
	}
	return row[0].(int64), nil
}

// Close gives the connection back.
func (w *Watch) Close() error {
	var errs []error
	if w.version != nil {
		errs = append(errs, w.conn.Raw(func(any) error { return w.version.Close() }))
	}
	if w.rewinds != nil {
		errs = append(errs, w.rewinds.Close())
	}
	return errors.Join(append(errs, w.conn.Close())...)
}
