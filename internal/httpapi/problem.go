package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"postrider/executor"
	"postrider/internal/sqlite"
)

// problem is an answer that says what is wrong, as RFC 9457 has it. The type is always about:blank: status and field are
// for programs, detail is for people.
type problem struct {
	Type   string `json:"type"`
	Title  string `json:"title"` // of the status
	Status int    `json:"status"`
	Detail string `json:"detail,omitempty"`
	Field  string `json:"field,omitempty"` // what of the request is wrong, in the words of README.md

	retry  time.Duration // when the same request may have luck; 0: it will not
	reason string        // of a 503, for the log; "": other
}

func newProblem(status int, format string, args ...any) *problem {
	return &problem{Type: "about:blank", Title: http.StatusText(status), Status: status, Detail: fmt.Sprintf(format, args...)}
}

// badField is a 400 about one field.
func badField(field, format string, args ...any) *problem {
	p := newProblem(http.StatusBadRequest, field+": "+format, args...)
	p.Field = field
	return p
}

// The reasons why inputs are not taken.
const (
	reasonFull     = "full"     // the disk
	reasonBusy     = "busy"     // the database
	reasonFlood    = "flood"    // too many requests, or bytes, in hand
	reasonStarting = "starting" // the node
	reasonOther    = "other"    // it ends, or has a fault
)

// tryLater is a 503. Nothing was stored, except where the detail says otherwise.
func tryLater(reason string, after time.Duration, format string, args ...any) *problem {
	p := newProblem(http.StatusServiceUnavailable, format, args...)
	p.reason, p.retry = reason, after
	return p
}

// problemOf says what an error of the node is to a client.
func problemOf(err error) *problem {
	var field *executor.FieldError
	switch {
	case errors.As(err, &field):
		name := field.Field
		if name == "id" {
			name = keyHeader // it came as that
		}
		return badField(name, "%s", field.Err)
	case errors.Is(err, executor.ErrInvalid):
		return newProblem(http.StatusBadRequest, "%s", err)
	case errors.Is(err, executor.ErrNotFound):
		return newProblem(http.StatusNotFound, "%s", err)
	case errors.Is(err, executor.ErrConflict):
		return newProblem(http.StatusConflict, "%s", err)
	case errors.Is(err, ErrNotReady):
		return tryLater(reasonStarting, time.Second, "%s", err)
	case errors.Is(err, sqlite.ErrFull):
		return tryLater(reasonFull, time.Minute, "%s", sqlite.ErrFull)
	case errors.Is(err, sqlite.ErrBusy):
		return tryLater(reasonBusy, time.Second, "%s", sqlite.ErrBusy)
	case errors.Is(err, sqlite.ErrUnknown):
		return tryLater(reasonOther, 5*time.Second, "the node ends, and whether the input is stored is not known: under its id it can be sent again")
	case errors.Is(err, sqlite.ErrClosed), errors.Is(err, context.Canceled):
		return tryLater(reasonOther, 5*time.Second, "the node ends")
	case errors.Is(err, context.DeadlineExceeded):
		return tryLater(reasonBusy, 5*time.Second, "the database does not get to it")
	}
	reason, _, _ := strings.Cut(err.Error(), "\n") // a stack may follow
	return newProblem(http.StatusInternalServerError, "%s", reason)
}

func (p *problem) write(w http.ResponseWriter) {
	if p.retry > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int(p.retry.Seconds())))
	}
	writeJSON(w, p.Status, "application/problem+json", p)
}

// answerFor bounds how long whoever asked may take to read its answer, counted from when there is one.
const answerFor = 20 * time.Second

// writeJSON answers. It escapes what HTML has a meaning for, and text that is not UTF-8 becomes U+FFFD.
func writeJSON(w http.ResponseWriter, status int, contentType string, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // structs of strings and numbers
	}
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(answerFor)) // the server's began with the request
	h := w.Header()
	h.Set("Content-Type", contentType)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n')) // who asked may be gone
}
