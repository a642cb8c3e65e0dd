package executor

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/oklog/ulid/v2"

	"postrider/internal/record"
	"postrider/internal/sqlite"
)

var (
	// ErrInvalid: the request itself is wrong; the message names the field.
	ErrInvalid = errors.New("invalid")
	// ErrNotFound: there is no such agent, run or step here.
	ErrNotFound = errors.New("not found")
	// ErrConflict: the request contradicts what is stored.
	ErrConflict = errors.New("conflict")
)

// maxInput is the most data of one input: what a frame to an agent has room for beside the largest state.
const maxInput = 8 << 20

// Input is one message for an agent, from outside the steps.
type Input struct {
	Tenant string
	Agent  string // NAME, or NAME@NODE for another node's
	Run    string // "": a new run, named by a ULID
	ID     string // the sender's; "": a new one
	Type   string
	Data   []byte        // JSON; kept as it came
	Source string        // a CloudEvents source, or cli, http, mqtt:<topic>
	In     time.Duration // due after
	AtUS   int64         // due at, in microseconds since 1970 by the wall clock; excludes In; neither: now

	Correlation, Causation, Trace string // "": none; without a correlation the id is it
}

// Submitted says where an input went.
type Submitted struct {
	Tenant    string `json:"tenant"`
	Run       string `json:"run"`
	ID        string `json:"id"`
	Duplicate bool   `json:"duplicate"` // the same input was stored before; nothing was changed
	Row       int64  `json:"-"`         // inbox.id; 0 of a duplicate
}

// Submit stores an input durably and returns. It needs no running node: one that runs finds the input by its poll, or
// at once when its Wake is called. Errors: ErrInvalid, ErrNotFound (an agent that was never hosted here, and has no route
// and no node), ErrConflict (the id with other content, a run of another agent, a run that is over).
func Submit(ctx context.Context, store *sqlite.Store, in Input) (Submitted, error) {
	if err := in.check(); err != nil {
		return Submitted{}, err
	}
	explicit := in.ID != ""
	if !explicit {
		in.ID = ulid.Make().String()
	}
	if in.Run == "" {
		in.Run = ulid.Make().String()
	}
	out := Submitted{Tenant: in.Tenant, Run: in.Run, ID: in.ID}
	agent, node, _ := strings.Cut(in.Agent, "@")
	err := store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) (err error) {
		out.Row, out.Duplicate, err = accept(ctx, tx, arrival{
			tenant: in.Tenant, run: in.Run, agent: agent, node: node, id: in.ID, explicit: explicit, typ: in.Type, source: in.Source,
			data: in.Data, in: in.In, atUS: in.AtUS, correlation: in.Correlation, causation: in.Causation, trace: in.Trace,
		})
		return err
	})
	if err != nil {
		return Submitted{}, err
	}
	return out, nil
}

func (in *Input) check() error {
	agent, node, remote := strings.Cut(in.Agent, "@")
	for _, f := range []struct{ field, name string }{{"tenant", in.Tenant}, {"agent", agent}} {
		if err := record.CheckName(f.name); err != nil {
			return &FieldError{f.field, err}
		}
	}
	if err := record.CheckName(node); remote && err != nil {
		return &FieldError{"agent", fmt.Errorf("its node %w", err)}
	}
	if in.Run != "" {
		if err := record.CheckName(in.Run); err != nil {
			return &FieldError{"run", err}
		}
	}
	if in.ID != "" {
		if in.Run == "" {
			return &FieldError{"id", errors.New("ids count within a run, and none is given")}
		}
		if err := checkID(in.ID); err != nil {
			return &FieldError{"id", err}
		}
		if strings.HasPrefix(in.ID, idPrefix) {
			return &FieldError{"id", fmt.Errorf("%q starts with %s, which is kept for agents' commands", in.ID, idPrefix)}
		}
	}
	if err := checkType(in.Type); err != nil {
		return &FieldError{"type", err}
	}
	for _, f := range []struct{ field, s string }{{"correlation", in.Correlation}, {"causation", in.Causation}, {"traceparent", in.Trace}} {
		if err := checkID(f.s); err != nil && f.s != "" {
			return &FieldError{f.field, err}
		}
	}
	if err := checkJSON(in.Data, maxInput); err != nil {
		return &FieldError{"data", err}
	}
	switch now := time.Now().UnixMicro(); {
	case in.In < 0:
		return &FieldError{"in", fmt.Errorf("%s is negative", in.In)}
	case in.In > 0 && in.AtUS != 0:
		return &FieldError{"at", errors.New("excludes in")}
	case in.In > 0 && now > maxUS-in.In.Microseconds():
		return &FieldError{"in", fmt.Errorf("%s leads beyond the year %d", in.In, maxYear)}
	case in.AtUS < 0 || in.AtUS > maxUS:
		return &FieldError{"at", fmt.Errorf("%d microseconds is not a time from 1970 to %d", in.AtUS, maxYear)}
	}
	return nil
}

// idPrefix starts the input ids of agents' commands, and of nothing else.
const idPrefix = "pr:"

func checkID(s string) error {
	if s == "" || len(s) > 512 {
		return fmt.Errorf("has %d bytes; 1 to 512 are allowed", len(s))
	}
	return record.CheckText(s)
}

func checkType(s string) error {
	if s == "" || len(s) > 255 {
		return fmt.Errorf("has %d bytes; 1 to 255 are allowed", len(s))
	}
	return record.CheckText(s)
}

func checkJSON(b []byte, limit int) error {
	switch {
	case len(b) > limit:
		return fmt.Errorf("has %d bytes; at most %d are allowed", len(b), limit)
	case !utf8.Valid(b):
		return errors.New("is not UTF-8")
	}
	if json.Valid(b) {
		return nil
	}
	var v json.RawMessage
	err := json.Unmarshal(b, &v)
	var syntax *json.SyntaxError
	if errors.As(err, &syntax) {
		return fmt.Errorf("is not JSON: %w at byte %d", err, syntax.Offset)
	}
	return fmt.Errorf("is not JSON: %w", err)
}

// arrival is an input on its way into the inbox, on any path.
type arrival struct {
	tenant, run, agent string
	node               string // an explicit @node
	id                 string
	explicit           bool // the id was chosen by somebody: it may come again
	typ, source        string
	data               []byte
	in                 time.Duration // due after
	atUS               int64         // due at, by the wall clock; neither: now
	expires            int64         // steady time; 0: never
	hops               int64
	correlation        string
	causation          string
	trace              string
	createdBranch      int64 // by a step; 0: from outside
	createdStep        int64
	commandID          string
	routed             bool // its agent is not hosted here: a step's command that may leave
}

// due is max(arrival, due) in steady time.
func (a *arrival) due(tx *sqlite.Tx) int64 {
	if a.atUS != 0 {
		return max(tx.SteadyUS, tx.SteadyUS+a.atUS-tx.WallUS)
	}
	return tx.SteadyUS + max(0, a.in.Microseconds())
}

// root is what the input and all that comes of it are found by: the sender's correlation, or its own id.
func (a *arrival) root() string {
	if a.correlation == "" {
		return a.id
	}
	return a.correlation
}

// hash is the content that an id stands for: a second arrival with another hash is a conflict.
func (a *arrival) hash() []byte {
	h := sha256.New()
	for _, part := range [][]byte{[]byte(a.agent), []byte(a.typ), a.data} {
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part))))
		h.Write(part)
	}
	return h.Sum(nil)
}

// accept stores an input where it belongs: at its run, which is made when this is its first input, or, for another node,
// without a run, until it is due and handed over. An explicit id that was stored before changes nothing: duplicate when
// the content agrees, ErrConflict otherwise. An id counts as seen only with its input. Errors: ErrNotFound (nobody knows
// the agent), ErrConflict, ErrInvalid (too large to leave).
func accept(ctx context.Context, tx *sqlite.Tx, a arrival) (row int64, duplicate bool, err error) {
	to, err := placeOf(ctx, tx, a)
	if err != nil {
		return 0, false, err
	}
	if to.here() {
		return enqueue(ctx, tx, a)
	}
	if len(a.data) > to.limit {
		return 0, false, &FieldError{"data", tooLarge(a, to)}
	}
	if fresh, err := lookUp(ctx, tx, a); err != nil || !fresh {
		return 0, err == nil, err
	}
	if row, err = insertInput(ctx, tx, 0, a, ""); err != nil {
		return 0, false, err
	}
	return row, false, remember(ctx, tx, a, row, "")
}

// enqueue is accept for an input that belongs to a run of this node.
func enqueue(ctx context.Context, tx *sqlite.Tx, a arrival) (row int64, duplicate bool, err error) {
	if fresh, err := lookUp(ctx, tx, a); err != nil || !fresh {
		return 0, err == nil, err
	}
	stray, err := straysBefore(ctx, tx, a)
	if err != nil {
		return 0, false, err
	}
	var run int64
	if !stray {
		if run, err = openRun(ctx, tx, a); err != nil {
			return 0, false, err
		}
	}
	if row, err = insertInput(ctx, tx, run, a, ""); err != nil {
		return 0, false, err
	}
	if err := remember(ctx, tx, a, row, ""); err != nil {
		return 0, false, err
	}
	if stray {
		return row, false, nil // adopt gives it to its run
	}
	return row, false, wake(ctx, tx, run, a.due(tx))
}

// openRun finds the run that takes an input, or makes it. ErrConflict: it takes no such input.
func openRun(ctx context.Context, tx *sqlite.Tx, a arrival) (run int64, err error) {
	run, agent, status, err := findRun(ctx, tx, a.tenant, a.run)
	if errors.Is(err, sql.ErrNoRows) {
		run, err = startRun(ctx, tx, a)
		agent, status = a.agent, "idle"
	}
	switch {
	case err != nil:
		return 0, err
	case agent != a.agent:
		return 0, fmt.Errorf("%w: run %s belongs to agent %s, not %s", ErrConflict, a.run, agent, a.agent)
	case status == "done" || status == "failed":
		return 0, fmt.Errorf("%w: run %s is %s and takes no input", ErrConflict, a.run, status)
	}
	return run, nil
}

// deadLetter stores an input that nobody can take, at its run if there is one. The sender need not send it again; if it
// does, with an explicit id, nothing is changed.
func deadLetter(ctx context.Context, tx *sqlite.Tx, a arrival, reason string) error {
	// The id may stand for another input. Its own mark among the ids is one that nobody can choose.
	mark := a
	mark.id += "\x00" + hex.EncodeToString(a.hash())
	if fresh, err := lookUp(ctx, tx, mark); err != nil || !fresh {
		return err
	}
	run, _, _, err := findRun(ctx, tx, a.tenant, a.run)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return err
	}
	row, err := insertInput(ctx, tx, run, a, reason)
	if err != nil {
		return err
	}
	if err := remember(ctx, tx, mark, row, ""); err != nil {
		return err
	}
	return remember(ctx, tx, a, row, "")
}

// insertInput adds the inbox row, with run 0 without a run; with a reason it is a dead letter from the start.
func insertInput(ctx context.Context, tx *sqlite.Tx, run int64, a arrival, deadReason string) (row int64, err error) {
	var ended, outcome, reason any
	if deadReason != "" {
		ended, outcome, reason = tx.NowUS, "dead", deadReason
	}
	var branch, step any
	if a.createdBranch != 0 {
		branch, step = a.createdBranch, a.createdStep
	}
	_, row, err = tx.Exec(ctx, `INSERT INTO inbox (run, tenant, run_name, agent, node, input_id, type, source, hops, correlation, causation, trace,
		arrived_us, due_us, at_us, expires_us, created_branch, created_step, command_id, ended_us, outcome, reason, data)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
		optionalUS(run), a.tenant, a.run, a.agent, optional(a.node), a.id, a.typ, a.source, a.hops, optional(a.root()), optional(a.causation), optional(a.trace),
		tx.NowUS, a.due(tx), optionalUS(a.atUS), optionalUS(a.expires), branch, step, optional(a.commandID), ended, outcome, reason, a.data)
	if err != nil {
		return 0, fmt.Errorf("store input %s of run %s: %w", a.id, a.run, err)
	}
	return row, nil
}

// wake schedules a run at due at the latest, unless it is in hand, or waits out a pause after an error, or for a person.
func wake(ctx context.Context, tx *sqlite.Tx, run, due int64) error {
	_, _, err := tx.Exec(ctx, `UPDATE run SET status = iif(?2 <= ?4, 'ready', 'waiting'), wake_us = min(COALESCE(wake_us, ?2), ?2), updated_us = ?3
		WHERE id = ?1 AND (status IN ('idle', 'ready') OR status = 'waiting' AND claim_step IS NULL) AND (wake_us IS NULL OR wake_us > ?2)`,
		run, due, tx.NowUS, tx.SteadyUS)
	if err != nil {
		return fmt.Errorf("wake run: %w", err)
	}
	return nil
}

func optional(s string) any {
	if s == "" {
		return nil
	}
	return s
}

// optionalUS is NULL for 0, a time that is not set, or a row that there is not.
func optionalUS(n int64) any {
	if n == 0 {
		return nil
	}
	return n
}
