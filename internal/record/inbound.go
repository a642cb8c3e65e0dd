package record

// Inbound is an input on its way in from a broker; with a Fault, what could not become one and is a dead letter.
type Inbound struct {
	Tenant, Agent string // "" only with a Fault
	Run           string // "": a new one
	ID            string // input id; "": the sender gave none, and a redelivery is another input
	Type, Source  string // a CloudEvents source, or mqtt:<topic>
	Data          []byte // JSON as it came; with a Fault the payload

	Correlation, Causation, Trace string
	Hops                          int64 // hand-overs so far
	Expires                       int64 // wall-clock microseconds since 1970; 0: never

	// From is the sender's key where another Postrider node sent this, with LSN; then ID may begin with pr:.
	FromNode string
	From     BranchKey
	LSN      int64 // 0: no record of a node

	Fault string // why it is a dead letter; "": it is none
}
