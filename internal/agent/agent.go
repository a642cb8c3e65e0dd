// Package agent is the contract between Postrider and the code that decides steps: what an agent is given, what it may
// ask for, and how it says that it cannot. It knows no store, no broker and no process; every kind of hosting (Go code,
// child processes) meets the executor here. An agent performs nothing: a step returns intents, and the executor commits
// all of them or none.
package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"
)

// Agent decides steps. Step is called from several goroutines at once, never twice at once for one run. It must return
// soon after ctx ends; its result is then ignored. The same step may be asked again after a crash, a timeout or an
// error: Step.ID stays the same then and is the idempotency key for whatever the agent calls.
type Agent interface {
	Step(ctx context.Context, s Step) (Effects, error)
}

// Func lets a function be an Agent.
type Func func(ctx context.Context, s Step) (Effects, error)

// Step implements Agent.
func (f Func) Step(ctx context.Context, s Step) (Effects, error) { return f(ctx, s) }

// Step is what one decision is made of.
type Step struct {
	Tenant, Run, Branch, Agent string
	Number                     int64           // the step to decide, from 1, along the lineage
	Attempt                    int64           // from 1
	Now, Deadline              time.Time       // UTC; Deadline is hard
	State                      json.RawMessage // as the last step left it, byte for byte; null before the first
	Input                      *Input          // nil for a step after next: continue
	LastError                  string          // why the previous attempt failed, or ""
}

// ID names this decision: the same on every attempt, never the same for another input.
func (s Step) ID() string {
	in := "-"
	if s.Input != nil {
		in = s.Input.ID
	}
	return s.Tenant + "/" + s.Run + "/" + s.Branch + "/" + strconv.FormatInt(s.Number, 10) + "/" + in
}

// Input is one message from the inbox.
type Input struct {
	ID, Type string
	Data     json.RawMessage // the sender's bytes
	At       time.Time       // when it was stored, UTC
	Source   string          // a CloudEvents source, or cli, http, mqtt:<topic>, timer
}

// Next is what a run does after a step.
type Next string

const (
	Wait     Next = "wait"     // for the next input (default)
	Continue Next = "continue" // another step at once, without input
	Done     Next = "done"     // the run is over and accepts no input
	Fail     Next = "fail"     // the same, as a failure
)

// Effects is what a step returns: intents only. The zero value is legal and consumes the input.
type Effects struct {
	State    json.RawMessage // nil: unchanged
	Events   []Event
	Commands []Command
	Messages []Message
	Cancel   []string // ids of own pending commands
	Next     Next     // "": Wait
}

// Event is a fact on the run's own topic.
type Event struct {
	Type    string
	Data    json.RawMessage // nil: null
	Subject string
}

// Command is an input for an agent: this one and this run when both are empty.
type Command struct {
	Agent     string // NAME, or NAME@NODE
	Run       string
	Type      string
	ID        string          // the sender's name for it, unique within its run; "" gets one
	Data      json.RawMessage // nil: null
	In        time.Duration   // due after; at most one of In and At
	At        time.Time       // due at; zero: now
	ExpiresIn time.Duration   // 0: never
}

// Message is a raw MQTT message at QoS 1.
type Message struct {
	Topic     string
	Payload   []byte
	Retain    bool
	ExpiresIn time.Duration // 0: never
}

// Code says what an Error means for the input.
type Code string

const (
	Retryable Code = "retryable" // try again after a growing pause; the default for every error
	Terminal  Code = "terminal"  // dead letter at once
	Busy      Code = "busy"      // try again after RetryAfter; never counts as an attempt
)

// Error is an agent's own verdict on a step. Any other error counts as Retryable.
type Error struct {
	Code       Code
	Message    string
	RetryAfter time.Duration // Busy only; 0 lets the executor choose
}

func (e *Error) Error() string { return fmt.Sprintf("agent says %s: %s", e.Code, e.Message) }
