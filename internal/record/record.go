// Package record is what travels: the records of an outbox, their identity (BranchKey, LSN), their form on the wire as
// structured CloudEvents 1.0 JSON, and the topics they travel on. It is pure: no I/O, no clock. Data is carried as the
// bytes that came; the envelope is written around it.
package record

// Kind is what a record is for.
type Kind int64

const (
	Event   Kind = 1 // a fact on the run's topic; what the fold counts
	Command Kind = 2 // an input for an agent of another node
	Message Kind = 3 // raw MQTT for devices and other software; carries no key
)

// BranchKey names one line of history of a run. Branch is a ULID, never reused, in no database.
type BranchKey struct{ Tenant, Run, Branch string }

// Record is one row of the outbox. Its identity is (Key, LSN).
type Record struct {
	Node    string // of the sender
	Key     BranchKey
	LSN     int64 // dense and ascending within the branch
	PrevLSN int64 // LSN of the previous event of the lineage; 0 only for the run's first event
	Gen     int64 // 1, 2, … per run: which of the run's branches
	Epoch   int64 // life of the sender's database
	Step    int64

	Kind    Kind
	Type    string // of events and commands
	Subject string
	Data    []byte // JSON as it came; for messages the payload

	Occurred, Recorded              int64 // microseconds since 1970, UTC
	Correlation, Causation, Trace   string
	ToNode, ToAgent, ToRun, InputID string // commands only
	Hops                            int64
	Topic                           string // messages only
	Retain                          bool
	Expires                         int64 // microseconds since 1970; 0: never
}

// Source is the record's CloudEvents source, /<node>/<tenant>/<run>/<branch>. With the LSN as CloudEvents id it is the
// record's identity.
func (r *Record) Source() string {
	return "/" + r.Node + "/" + r.Key.Tenant + "/" + r.Key.Run + "/" + r.Key.Branch
}

// IsMark says that the record is not the one that was committed at its LSN but stands in its place, because that one is
// dead or was never delivered.
func (r *Record) IsMark() bool { return r.Kind == Event && r.Type == TypeRecordDead }
