package executor

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/oklog/ulid/v2"

	"postrider/internal/record"
	"postrider/internal/sqlite"
)

// Receive takes in what came from a broker, all of it in one transaction, and says what became of each: stored, duplicate
// (nothing was changed), conflict or dead (set aside, with its reason). After nil all of it is durable, and may be
// acknowledged; after an error nothing is. What cannot be an input is a dead letter and never an error, so that it does
// not come again for ever.
func Receive(ctx context.Context, store *sqlite.Store, in []record.Inbound) ([]record.Outcome, error) {
	out := make([]record.Outcome, len(in))
	take := func(from, to int) error {
		return store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) (err error) {
			for i := from; i < to; i++ {
				if out[i], err = takeIn(ctx, tx, &in[i]); err != nil {
					return err
				}
			}
			return nil
		})
	}
	err := take(0, len(in))
	if err == nil || !sqlite.IsConstraint(err) {
		return out, err
	}
	// One of them is such that the database refuses it, though it passed all checks: it must not hold up the others.
	for i := range in {
		if err = take(i, i+1); sqlite.IsConstraint(err) {
			in[i].Fault, in[i].LSN = "cannot be stored: "+err.Error(), 0
			err = take(i, i+1)
		}
		if err != nil {
			return nil, err // those before are stored, and will be duplicates
		}
	}
	return out, nil
}

// Registered fails while no node has ever written down in this database which agents and routes it has: every input would
// be a dead letter.
func Registered(ctx context.Context, store *sqlite.Store) error {
	var known bool
	err := store.Get(ctx, "SELECT EXISTS (SELECT 1 FROM agent) OR EXISTS (SELECT 1 FROM route)", nil, &known)
	if err != nil {
		return fmt.Errorf("look for agents: %w", err)
	}
	if !known {
		return errors.New("its node has not run yet: no agent is known here")
	}
	return nil
}

func takeIn(ctx context.Context, tx *sqlite.Tx, in *record.Inbound) (record.Outcome, error) {
	a := arrival{tenant: in.Tenant, run: in.Run, agent: in.Agent, id: in.ID, explicit: in.ID != "", typ: in.Type, source: in.Source, data: in.Data,
		hops: in.Hops, correlation: in.Correlation, causation: in.Causation, trace: in.Trace}
	if a.data == nil {
		a.data = []byte{}
	}
	fault := in.Fault
	if fault == "" {
		fault = check(in)
	}
	if fault != "" {
		_, err := insertInput(ctx, tx, 0, a, cut(fault, 1024))
		return record.DeadInput, err
	}
	if in.LSN != 0 {
		if fresh, err := noteLSN(ctx, tx, in.FromNode, in.From, in.LSN); err != nil || !fresh {
			return record.Duplicate, err
		}
	}
	if !a.explicit {
		a.id = ulid.Make().String()
	}
	if a.run == "" {
		a.run = ulid.Make().String()
	}
	if in.Expires != 0 {
		a.expires = max(1, tx.SteadyUS+in.Expires-tx.WallUS)
	}
	_, duplicate, err := accept(ctx, tx, a)
	switch {
	case errors.Is(err, ErrConflict):
		return record.Conflict, deadLetter(ctx, tx, a, err.Error())
	case errors.Is(err, ErrNotFound), errors.Is(err, ErrInvalid):
		return record.DeadInput, deadLetter(ctx, tx, a, err.Error())
	case err != nil:
		return "", err
	case duplicate:
		return record.Duplicate, nil
	}
	return record.Stored, nil
}

// check says what keeps a message from being an input, as Submit does for others.
func check(in *record.Inbound) string {
	i := Input{Tenant: in.Tenant, Agent: in.Agent, Run: in.Run, ID: in.ID, Type: in.Type, Data: in.Data, Correlation: in.Correlation, Causation: in.Causation, Trace: in.Trace}
	if strings.HasPrefix(in.ID, idPrefix) && in.LSN != 0 {
		i.ID = strings.TrimPrefix(in.ID, idPrefix) // a node's commands have such ids
	}
	if err := i.check(); err != nil {
		return strings.TrimPrefix(err.Error(), ErrInvalid.Error()+" ")
	}
	if in.Hops < 0 || in.Hops > maxHops {
		return fmt.Sprintf("hops: %d is not in 0 to %d", in.Hops, maxHops)
	}
	return ""
}
