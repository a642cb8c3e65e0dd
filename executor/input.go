package executor

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/binary"
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
	Tenant, Agent string
	Run           string // "": a new run, named by a ULID
	ID            string // the sender's; "": a new one
	Type          string
	Data          []byte        // JSON; kept as it came
	Source        string        // a CloudEvents source, or cli, http, mqtt:<topic>
	In            time.Duration // due after
	AtUS          int64         // due at, in microseconds since 1970 by the wall clock; excludes In; neither: now
}

// Submitted says where an input went.
type Submitted struct {
	Tenant    string `json:"tenant"`
	Run       string `json:"run"`
	ID        string `json:"id"`
	Duplicate bool   `json:"duplicate"` // the same input was stored before; nothing was changed
}

// Submit stores an input durably and returns. It needs no running node: one that runs finds the input by its poll, or
// at once when wake is called. Errors: ErrInvalid, ErrNotFound (an agent never hosted here), ErrConflict (the id with
// other content, a run of another agent, a run that is over).
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
	err := store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) error {
		var one int
		err := tx.Get(ctx, "SELECT 1 FROM agent WHERE name = ?", []any{in.Agent}, &one)
		if errors.Is(err, sql.ErrNoRows) {
			return fmt.Errorf("%w: agent %s was never hosted here", ErrNotFound, in.Agent)
		}
		if err != nil {
			return fmt.Errorf("look up agent %s: %w", in.Agent, err)
		}
		out.Duplicate, err = enqueue(ctx, tx, arrival{
			tenant: in.Tenant, run: in.Run, agent: in.Agent, id: in.ID, explicit: explicit, typ: in.Type, source: in.Source,
			data: in.Data, in: in.In, atUS: in.AtUS,
		})
		return err
	})
	if err != nil {
		return Submitted{}, err
	}
	return out, nil
}

func (in *Input) check() error {
	for _, f := range []struct{ field, name string }{{"tenant", in.Tenant}, {"agent", in.Agent}} {
		if err := record.CheckName(f.name); err != nil {
			return fmt.Errorf("%w %s: %w", ErrInvalid, f.field, err)
		}
	}
	if in.Run != "" {
		if err := record.CheckName(in.Run); err != nil {
			return fmt.Errorf("%w run: %w", ErrInvalid, err)
		}
	}
	if in.ID != "" {
		if in.Run == "" {
			return fmt.Errorf("%w id: ids count within a run, and none is given", ErrInvalid)
		}
		if err := checkID(in.ID); err != nil {
			return fmt.Errorf("%w id: %w", ErrInvalid, err)
		}
		if strings.HasPrefix(in.ID, idPrefix) {
			return fmt.Errorf("%w id: %q starts with %s, which is kept for agents' commands", ErrInvalid, in.ID, idPrefix)
		}
	}
	if err := checkType(in.Type); err != nil {
		return fmt.Errorf("%w type: %w", ErrInvalid, err)
	}
	if err := checkJSON(in.Data, maxInput); err != nil {
		return fmt.Errorf("%w data: %w", ErrInvalid, err)
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
}

// due is max(arrival, due) in steady time.
func (a *arrival) due(tx *sqlite.Tx) int64 {
	if a.atUS != 0 {
		return max(tx.SteadyUS, tx.SteadyUS+a.atUS-tx.WallUS)
	}
	return tx.SteadyUS + max(0, a.in.Microseconds())
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

// enqueue stores an input, making its run when it is the first, and wakes the run. An explicit id that was stored
// before changes nothing: true when the content agrees, ErrConflict otherwise. An id counts as seen only with its input.
func enqueue(ctx context.Context, tx *sqlite.Tx, a arrival) (duplicate bool, err error) {
	if a.explicit {
		n, _, err := tx.Exec(ctx, `INSERT INTO seen (tenant, run_name, input_id, hash, hops, at_us) VALUES (?, ?, ?, ?, ?, ?)
			ON CONFLICT DO NOTHING`, a.tenant, a.run, a.id, a.hash(), a.hops, tx.NowUS)
		if err != nil {
			return false, fmt.Errorf("remember input %s: %w", a.id, err)
		}
		if n == 0 {
			var hash []byte
			err := tx.Get(ctx, "SELECT hash FROM seen WHERE tenant = ? AND run_name = ? AND input_id = ?", []any{a.tenant, a.run, a.id}, &hash)
			if err != nil {
				return false, fmt.Errorf("look up input %s: %w", a.id, err)
			}
			if string(hash) != string(a.hash()) {
				return false, fmt.Errorf("%w: input id %q of run %s was used for other content", ErrConflict, a.id, a.run)
			}
			return true, nil
		}
	}
	run, agent, status, err := findRun(ctx, tx, a.tenant, a.run)
	if errors.Is(err, sql.ErrNoRows) {
		run, err = startRun(ctx, tx, a.tenant, a.run, a.agent)
		agent, status = a.agent, "idle"
	}
	if err != nil {
		return false, err
	}
	switch {
	case agent != a.agent:
		return false, fmt.Errorf("%w: run %s belongs to agent %s, not %s", ErrConflict, a.run, agent, a.agent)
	case status == "done" || status == "failed":
		return false, fmt.Errorf("%w: run %s is %s and takes no input", ErrConflict, a.run, status)
	}
	if err := insertInput(ctx, tx, run, a, ""); err != nil {
		return false, err
	}
	return false, wake(ctx, tx, run, a.due(tx))
}

// insertInput adds the inbox row; with a reason it is a dead letter from the start.
func insertInput(ctx context.Context, tx *sqlite.Tx, run int64, a arrival, deadReason string) error {
	var ended, outcome, reason any
	if deadReason != "" {
		ended, outcome, reason = tx.NowUS, "dead", deadReason
	}
	var branch, step any
	if a.createdBranch != 0 {
		branch, step = a.createdBranch, a.createdStep
	}
	_, _, err := tx.Exec(ctx, `INSERT INTO inbox (run, tenant, run_name, agent, node, input_id, type, source, hops, correlation, causation, trace,
		arrived_us, due_us, at_us, expires_us, created_branch, created_step, command_id, ended_us, outcome, reason, data)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
		run, a.tenant, a.run, a.agent, optional(a.node), a.id, a.typ, a.source, a.hops, optional(a.correlation), optional(a.causation), optional(a.trace),
		tx.NowUS, a.due(tx), optionalUS(a.atUS), optionalUS(a.expires), branch, step, optional(a.commandID), ended, outcome, reason, a.data)
	if err != nil {
		return fmt.Errorf("store input %s of run %s: %w", a.id, a.run, err)
	}
	return nil
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

func optionalUS(us int64) any {
	if us == 0 {
		return nil
	}
	return us
}
