package executor

import (
	"context"

	"postrider/internal/sqlite"
)

// InputInfo is an input as an operator sees it.
type InputInfo struct {
	Row                           int64 // inbox.id: in order of arrival, unique in this database
	Tenant, Run, Agent            string
	Node                          string // an explicit @node
	ID, Type, Source              string
	State                         string
	ArrivedUS                     int64
	DueUS, NextUS, ExpiresUS      int64 // wall clock; 0: none
	Attempts, Hops                int64
	LastError                     string
	Reason                        string // of a state that ended it
	Branch                        string // where it was consumed
	Step                          int64
	Correlation, Causation, Trace string
	Data                          []byte // as it came
}

// FindInput finds an input by its id in a run, the newest one if there are several; ErrNotFound when there is none.
func FindInput(ctx context.Context, store *sqlite.Store, tenant, run, id string) (InputInfo, error) {
	return InputInfo{}, ErrNotFound
}
