package record

import (
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"
)

// ReservedPrefix starts the types of the runtime's own events. Agents may not use it.
const ReservedPrefix = "postrider."

// The types of the runtime's own events. They never expire and are never dead-lettered.
const (
	TypeRunStarted   = "postrider.run.started"
	TypeRunDone      = "postrider.run.done"
	TypeRunFailed    = "postrider.run.failed"
	TypeRunPaused    = "postrider.run.paused"
	TypeRunResumed   = "postrider.run.resumed"
	TypeBranchOpened = "postrider.branch.opened"
	TypeRecordDead   = "postrider.record.dead" // a mark
	TypeNodeRestored = "postrider.node.restored"
)

// BranchOpened is the data of postrider.branch.opened, the first record of every branch that is not its run's first.
type BranchOpened struct {
	Parent   string `json:"parent"` // the branch that holds the checkpoint forked from
	ForkStep int64  `json:"fork_step"`
	ForkLSN  int64  `json:"fork_lsn"` // the last LSN of the parent that is kept
	Reason   string `json:"reason"`   // such as rewind or restore
}

// AppendData appends the event's data. Equal values give equal bytes, so that the event can be made again from the branch
// row without a conflict.
func (o *BranchOpened) AppendData(dst []byte) []byte {
	dst = appendField(dst, `{"parent":`, o.Parent)
	dst = appendNumber(dst, `,"fork_step":`, o.ForkStep)
	dst = appendNumber(dst, `,"fork_lsn":`, o.ForkLSN)
	return append(appendField(dst, `,"reason":`, o.Reason), '}')
}

// ParseBranchOpened reads the data of postrider.branch.opened. More fields may follow.
func ParseBranchOpened(data []byte) (BranchOpened, error) {
	var o BranchOpened
	if err := json.Unmarshal(data, &o); err != nil {
		return BranchOpened{}, fmt.Errorf("parse branch.opened: %w", err)
	}
	if err := CheckBranch(o.Parent); err != nil {
		return BranchOpened{}, fmt.Errorf("parse branch.opened: parent %w", err)
	}
	if o.ForkStep < 0 || o.ForkLSN < 1 {
		return BranchOpened{}, fmt.Errorf("parse branch.opened: fork_step %d or fork_lsn %d is too small", o.ForkStep, o.ForkLSN)
	}
	return o, nil
}

// NodeRestored is the data of postrider.node.restored, which follows branch.opened in every run of a restored database.
type NodeRestored struct {
	Epoch       int64 `json:"epoch"`        // that starts with the restore
	BackupEpoch int64 `json:"backup_epoch"` // of the backup
}

// AppendData appends the event's data.
func (n *NodeRestored) AppendData(dst []byte) []byte {
	dst = appendNumber(dst, `{"epoch":`, n.Epoch)
	return append(appendNumber(dst, `,"backup_epoch":`, n.BackupEpoch), '}')
}

// ParseNodeRestored reads the data of postrider.node.restored. More fields may follow.
func ParseNodeRestored(data []byte) (NodeRestored, error) {
	var n NodeRestored
	if err := json.Unmarshal(data, &n); err != nil {
		return NodeRestored{}, fmt.Errorf("parse node.restored: %w", err)
	}
	if n.Epoch < 1 || n.BackupEpoch < 0 || n.BackupEpoch >= n.Epoch {
		return NodeRestored{}, fmt.Errorf("parse node.restored: epoch %d does not follow backup_epoch %d", n.Epoch, n.BackupEpoch)
	}
	return n, nil
}

// Dead is the data of a mark: why the record in whose place it stands is not there.
type Dead struct {
	Type       string `json:"type"` // of the record
	Attempts   int64  `json:"attempts"`
	Reason     string `json:"reason"` // such as poison, or "acknowledged but not delivered"
	FirstError string `json:"first_error"`
	LastError  string `json:"last_error"`
}

// maxMarkText bounds each text of a mark in bytes: a mark must pass where its record, perhaps for its size, did not.
const maxMarkText = 256

// AppendData appends the mark's data. Each text is cut to 256 bytes.
func (d *Dead) AppendData(dst []byte) []byte {
	dst = appendField(dst, `{"type":`, cut(d.Type))
	dst = appendNumber(dst, `,"attempts":`, d.Attempts)
	dst = appendField(dst, `,"reason":`, cut(d.Reason))
	dst = appendField(dst, `,"first_error":`, cut(d.FirstError))
	return append(appendField(dst, `,"last_error":`, cut(d.LastError)), '}')
}

// cut shortens s to maxMarkText bytes at a character's start.
func cut(s string) string {
	if len(s) <= maxMarkText {
		return s
	}
	n := maxMarkText
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// ParseDead reads the data of a mark. More fields may follow.
func ParseDead(data []byte) (Dead, error) {
	var d Dead
	if err := json.Unmarshal(data, &d); err != nil {
		return Dead{}, fmt.Errorf("parse record.dead: %w", err)
	}
	return d, nil
}

// Mark makes the mark that stands in the place of event r: with its key, LSN, place in the lineage and times, and nothing
// that the agent gave. d.Type is filled in.
func (r *Record) Mark(d Dead) Record {
	d.Type = r.Type
	return Record{
		Node: r.Node, Key: r.Key, LSN: r.LSN, PrevLSN: r.PrevLSN, Gen: r.Gen, Epoch: r.Epoch, Step: r.Step,
		Kind: Event, Type: TypeRecordDead, Data: d.AppendData(nil),
		Occurred: r.Occurred, Recorded: r.Recorded,
	}
}

// IsReserved says that only the runtime may give an event this type.
func IsReserved(typ string) bool { return strings.HasPrefix(typ, ReservedPrefix) }
