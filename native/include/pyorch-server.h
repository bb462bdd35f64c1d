// llama-server in the process of its runtime: routes beside its own, and how it ends. In libpyorch-server, which links
// llama-server; there is one server in a process.
//
// Declarations only below the guard, as in pyorch.h. Functions may be called from any thread.

#ifndef PYORCH_SERVER_H
#define PYORCH_SERVER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// A request for one of the routes. Valid during the call.
typedef struct pyorch_exchange {
    const char * headers; // "name: value\n" of each
    const char * body;
    uint64_t     body_size;
    const char * data; // what llama-server itself answers, where it has the route
    uint64_t     data_size;
    int32_t      status; // of that; 404 where it does not
    int32_t      local;  // nonzero: it came over the loopback interface or a Unix socket
    void *       answer;
    const void * request;
} pyorch_exchange;

// Calls pyorch_server_answer(); if it does not, llama-server's own answer stands. By the thread of the connection.
typedef void (*pyorch_answer_fn)(void * user, const pyorch_exchange * exchange);

// Of an answer: data is another body, which llama-server answers in place of the request's. REQUIRES: the route is
// PYORCH_SERVER_FIRST.
typedef enum pyorch_server_status {
    PYORCH_SERVER_CONTINUE = 100,
} pyorch_server_status;

// location: for a redirection, else NULL.
void pyorch_server_answer(const pyorch_exchange * exchange, int32_t status, const char * type, const char * location,
    const char * data, uint64_t data_size);

// Nonzero: nobody waits for the answer any more.
int32_t pyorch_server_has_left(const pyorch_exchange * exchange);

typedef enum pyorch_server_when {
    PYORCH_SERVER_BEHIND = 0, // llama-server's own answer is shown, where it has the route
    PYORCH_SERVER_FIRST  = 1, // llama-server answers only what is not answered here; data is empty and status 0
    PYORCH_SERVER_FAILED =
        2, // only what llama-server answers with a status of 500 or more is shown, and may be replaced;
           // of a stream, each part that speaks of an error, without what was asked
} pyorch_server_when;

// Adds a route of the server that runs next: "GET" or "POST", and its path.
void pyorch_server_add_route(
    const char * method, const char * path, int32_t when, pyorch_answer_fn answer, void * user);

// Shows what llama-server itself answers, where it has the path and runs. status and data of the exchange count.
// parameters: "name=value&..." of the path and of the query, may be empty. seconds: of waiting at most; an answer that
// takes longer is empty.
void pyorch_server_ask(const char * path, const char * parameters, const char * body, double seconds,
    pyorch_answer_fn answer, void * user);

// Shows the server's JSON schemas, as the body: of answers, tools and flags, before one becomes a grammar. If the check
// answers, the schema is refused with status 400, and the data is why. By the thread of the connection. Until the server
// has ended.
void pyorch_server_check_schemas(pyorch_answer_fn check, void * user);

// Requests for this path, with --api-prefix in front, need no API key.
void pyorch_server_make_public(const char * path);

// The path of the i-th file of llama-server's chat page, which is at "/"; NULL for more than there are. None where the
// page was not built.
const char * pyorch_server_get_page(uint64_t i);

// Seconds in which the head and the body of a request must have arrived, else its connection is ended.
void pyorch_server_set_limits(double head, double body);

// Each ggml_backend_dev_t that the server which runs next computes with and another process has: when one is gone, what
// is computed fails. Without this call: there are none.
void pyorch_server_set_devices(int32_t n, void * const * devices);

// Copies into text what llama-server says of its arguments if it refuses them, "" if it takes them. REQUIRES: no argument
// makes it print something and exit. Whatever other threads write to stderr meanwhile is lost.
void pyorch_server_check_arguments(int32_t argc, char ** argv, char * text, uint64_t text_size);

// Runs llama-server until pyorch_server_cancel(), and returns its exit status. Signals are left to the caller. May be
// called again: nothing is left then of what the one before was given, but the paths that are public.
int32_t pyorch_server_run(int32_t argc, char ** argv);

// The llama_context * that the server computes with, NULL while its model is not loaded. Valid until the server ends,
// which waits for the requests that are being answered.
void * pyorch_server_get_context(void);

// Connections, by what they wait for.
typedef struct pyorch_connections {
    uint64_t arriving;  // a request, or the rest of it
    uint64_t answering; // its answer, which the server is at work on
} pyorch_connections;

void pyorch_server_get_connections(pyorch_connections * connections);

// No connection is accepted any more, and those end that have no whole request. Nothing before the server answers.
void pyorch_server_stop_accepting(void);

// After that: answers that are being computed end within about a second, streams with a part that says so, others with
// status 503. Until pyorch_server_run() begins anew.
void pyorch_server_end_answers(void);

// After that: ends the other connections, and with them their requests, and lets pyorch_server_run() return when what
// is being computed is computed.
void pyorch_server_cancel(void);

#ifdef __cplusplus
}
#endif

#endif
